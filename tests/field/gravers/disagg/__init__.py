"""Disaggregated prefill: staging buffers, transfer channels and the two sides that use them."""
