"""Prefill/decode disaggregation: metadata buffers, rooms, sender and receiver queues."""
