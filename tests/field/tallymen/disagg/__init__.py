"""Prefill on some nodes, decode on others; KV blocks travel between them."""
from .decode import DecodeNode
from .prefill import PrefillNode

__all__ = ["DecodeNode", "PrefillNode"]
