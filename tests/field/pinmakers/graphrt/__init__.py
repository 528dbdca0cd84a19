"""graphrt: a small runtime that executes operator graphs over planned buffers."""
from .buffers import BufferHeap, Block
from .plan import Op, Plan
from .executor import Executor

__all__ = ["BufferHeap", "Block", "Op", "Plan", "Executor"]
