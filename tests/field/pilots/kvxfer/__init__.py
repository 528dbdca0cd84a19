from .arena import HostArena, Region
from .receiver import KVReceiver
from .sender import KVSender

__all__ = ["HostArena", "Region", "KVReceiver", "KVSender"]
