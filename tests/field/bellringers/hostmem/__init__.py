"""Pinned host memory for the input pipeline."""
from .arena import Arena, Region
from .loader import BatchLoader
from .pool import HostPool, LeaseSet, hold
from .prefetch import Prefetcher

__all__ = ["Arena", "Region", "BatchLoader", "HostPool", "LeaseSet", "Prefetcher", "hold"]
