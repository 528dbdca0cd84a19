"""Disaggregated prefill: ships KV pages from prefill to decode workers."""
