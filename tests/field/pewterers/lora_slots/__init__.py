from .loader import AdapterLoader
from .router import AdapterRouter, GenerationRequest
from .slots import AdapterSlot, AdapterSlots

__all__ = ["AdapterLoader", "AdapterRouter", "GenerationRequest", "AdapterSlot", "AdapterSlots"]
