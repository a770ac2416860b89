"""DualPath: agents served by vLLM prefill/decode pools whose KV-cache lives on storage."""

__version__ = "0.1.0"
