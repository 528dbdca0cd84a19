"""Sharded checkpoints: every rank writes its own regions, rank 0 the manifest."""
from .regions import Region, RegionPool
from .saver import Saver, SaveSession

__all__ = ["Region", "RegionPool", "Saver", "SaveSession"]
