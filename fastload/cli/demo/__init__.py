"""`fastload demo`: an S3 server behind a round trip, photos, the baseline, report and chart."""
