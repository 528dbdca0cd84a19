from .loader import SlotLoader
from .slots import Slot, SlotRing

__all__ = ["Slot", "SlotLoader", "SlotRing"]
