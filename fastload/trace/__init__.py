"""What a run was trained on: its digest and log, the comparison of two runs, and how to recreate it."""
