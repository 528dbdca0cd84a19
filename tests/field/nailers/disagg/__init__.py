"""Disaggregated prefill: KV pages move from prefill workers to decode workers."""
