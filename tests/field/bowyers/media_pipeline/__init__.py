"""Video decoding for multimodal training data."""
