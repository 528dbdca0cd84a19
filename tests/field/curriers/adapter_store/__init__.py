from .slots import AdapterSlots, SlotsFull
from .registry import AdapterRegistry
from .loader import AdapterLoader
