"""Embeds very long documents: dilated and ring attention over pooled buffers, and the service around it."""

from .encoder import EncoderConfig, LongDocEncoder
from .memory_pool import TensorMemoryPool, get_memory_pool

__all__ = ["EncoderConfig", "LongDocEncoder", "TensorMemoryPool", "get_memory_pool"]
