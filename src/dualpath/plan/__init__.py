"""Bottleneck-free range and P/D planner."""
