"""Embedding service: tensor pool, store connections, request path."""
from .service import EmbedService
from .tensors import TensorPool

__all__ = ["EmbedService", "TensorPool"]
