"""Two-tier cache of activations: device frames above, file extents below."""
from .frames import Frame, FramePool
from .service import ActivationService
from .tiers import ExtentFile, Tier

__all__ = ["ActivationService", "ExtentFile", "Frame", "FramePool", "Tier"]
