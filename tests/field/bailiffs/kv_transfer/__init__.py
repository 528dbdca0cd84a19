"""KV transfer between prefill and decode workers."""
