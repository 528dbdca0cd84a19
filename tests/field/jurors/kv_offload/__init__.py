from .tier import OffloadTier

__all__ = ["OffloadTier"]
