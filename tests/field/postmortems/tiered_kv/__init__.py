"""KV tiers: device, host and disk, with write-back and pinned loads."""
from .manager import TierManager
from .tiers import DeviceTier, HostTier, make_tiers

__all__ = ["TierManager", "DeviceTier", "HostTier", "make_tiers"]
