from .buffers import FlatBuffers
from .comm import Handle, LoopbackGroup
from .reducer import Reducer

__all__ = ["FlatBuffers", "Handle", "LoopbackGroup", "Reducer"]
