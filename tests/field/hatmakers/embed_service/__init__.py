"""Embedding service: staging buffers, micro-batches and the request handlers."""
