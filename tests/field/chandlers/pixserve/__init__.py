from .engine import PixEngine
from .slabs import FeatureSlots, PixelSlabs

__all__ = ["PixEngine", "PixelSlabs", "FeatureSlots"]
