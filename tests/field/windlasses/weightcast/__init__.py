"""Broadcast of trainer weights to rollout engines in pooled flat buckets."""
from .buckets import BucketPool, ScaledBuckets
from .lanes import LaneSet
from .sender import WeightSender

__all__ = ["BucketPool", "LaneSet", "ScaledBuckets", "WeightSender"]
