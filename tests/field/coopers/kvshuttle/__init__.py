"""KV shuttle between prefill and decode workers."""
