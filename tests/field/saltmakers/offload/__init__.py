"""CPU offload of optimizer states: pinned host pages, copy streams and the layer schedule."""
from .arena import HostPages, PinnedArena
from .mover import Mover, StreamPool
from .schedule import LayerSchedule

__all__ = ["HostPages", "LayerSchedule", "Mover", "PinnedArena", "StreamPool"]
