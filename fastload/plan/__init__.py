"""What `fastload plan` predicts with: a short probe, and a model of an epoch."""
