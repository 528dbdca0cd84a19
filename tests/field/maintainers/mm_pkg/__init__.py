"""Multimodal features: pool, encoder and worker."""
