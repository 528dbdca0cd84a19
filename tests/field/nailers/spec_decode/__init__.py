"""Draft-and-verify decoding over pooled scratch tensors."""
