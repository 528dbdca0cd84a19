"""Data loader that collates into page-locked slabs."""
from .loader import PinnedLoader
from .slabs import SlabArena

__all__ = ["PinnedLoader", "SlabArena"]
