from .layout import LayoutCache, LayoutTable
from .module import BlockSparseAttention, SlidingWindowAttention
from .workspace import IndexPool

__all__ = ["BlockSparseAttention", "IndexPool", "LayoutCache", "LayoutTable", "SlidingWindowAttention"]
