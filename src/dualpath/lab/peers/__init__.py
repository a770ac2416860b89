"""What else serves the same agents: vLLM's own ways to keep KV, on the lab's hosts."""
