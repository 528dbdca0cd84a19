"""Transfer of KV blocks from prefill to decode workers."""
