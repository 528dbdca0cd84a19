from .manager import OffloadManager
from .tiers import Page, Tier

__all__ = ["OffloadManager", "Page", "Tier"]
