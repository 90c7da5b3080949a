"""Which samples are read when: samplers, positions, states. Arithmetic."""
