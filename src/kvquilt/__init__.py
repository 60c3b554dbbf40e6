"""A KV-cache tier for hybrid-attention LLMs."""
