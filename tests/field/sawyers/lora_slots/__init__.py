from .engine import LoraEngine
from .registry import AdapterRegistry
from .slots import AdapterSlots

__all__ = ["AdapterRegistry", "AdapterSlots", "LoraEngine"]
