"""`fastload plan`: a short probe, and a model of an epoch."""
