"""Router side of disaggregated prefill and decode."""
