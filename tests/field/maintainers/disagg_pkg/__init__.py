"""Disaggregated prefill: staging, producer and consumer."""
