"""Public workload formats, read as trajectories. One module a format."""
