"""Lab experiments: the arithmetic on what was sampled, the result files, the page."""
