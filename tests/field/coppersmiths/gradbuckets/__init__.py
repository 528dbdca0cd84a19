"""Flat gradient buckets for the bucketed all-reduce."""
from .slab import SlabPool
from .bucket import Bucket, Bucketer
from .reducer import Reducer

__all__ = ["SlabPool", "Bucket", "Bucketer", "Reducer"]
