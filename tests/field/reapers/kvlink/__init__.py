"""Move KV caches from prefill to decode workers (disaggregated serving)."""
