from .receiver import WeightReceiver
from .sender import WeightSender

__all__ = ["WeightReceiver", "WeightSender"]
