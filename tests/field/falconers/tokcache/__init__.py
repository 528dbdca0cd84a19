"""Tokenised data sets on local disks: memory mapped regions with a byte budget."""
from .store import Dataset, build, merge
from .regions import RegionCache

__all__ = ["Dataset", "RegionCache", "build", "merge"]
