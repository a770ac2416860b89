"""The published evaluation (arXiv 2602.21548), figure by figure, run on the simulator."""
