"""Disaggregated prefill: one side computes KV, the other pulls it."""
