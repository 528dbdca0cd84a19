"""Paged KV cache with prefix sharing."""
from .allocator import Block, BlockAllocator
from .prefix import PrefixIndex
from .scheduler import Scheduler
from .table import BlockTable

__all__ = ["Block", "BlockAllocator", "BlockTable", "PrefixIndex", "Scheduler"]
