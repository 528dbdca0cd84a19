from .manager import OffloadManager
from .tiers import Tier, TierFull
from .transfer import TransferEngine

__all__ = ["OffloadManager", "Tier", "TierFull", "TransferEngine"]
