"""What was counted, and which stage is the bottleneck."""
