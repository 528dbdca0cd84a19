from .core import EngineCore
from .memory import PagePool, ScratchPool

__all__ = ["EngineCore", "PagePool", "ScratchPool"]
