"""Multimodal encoder: embedding cache, encoder runs and their scheduler."""
