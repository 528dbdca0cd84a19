"""Disaggregated prefill: KV pages travel from prefill to decode workers."""
