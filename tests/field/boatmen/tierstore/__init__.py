"""Offloads KV chunks from the device to host memory and from there to disk."""
from .manager import TierManager
from .tiers import DiskTier, HostTier, TierFull

__all__ = ["TierManager", "DiskTier", "HostTier", "TierFull"]
