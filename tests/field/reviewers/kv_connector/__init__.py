"""Disaggregated prefill: a connector which moves KV between two engines."""
