from .attention import SegmentAttention
from .pool import SharedPool, Scoped
from .trainer import Trainer

__all__ = ["SegmentAttention", "SharedPool", "Scoped", "Trainer"]
