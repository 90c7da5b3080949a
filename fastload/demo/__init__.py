"""What `fastload demo` measures with: a real S3 server behind a slow line, photos, the baseline, a chart."""
