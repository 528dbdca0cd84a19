"""Prefix cache for attention KV, organised as a radix tree over token ids."""
from .cache import PrefixCache
from .slots import TokenSlots
from .tree import Node, RadixTree

__all__ = ["Node", "PrefixCache", "RadixTree", "TokenSlots"]
