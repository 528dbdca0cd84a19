from .feeder import Feeder
from .ring import ShmRing

__all__ = ["Feeder", "ShmRing"]
