"""Registered communication buffers for NVLink/IB collectives."""
from .overlap import ColumnParallelOverlap, GradScatter
from .pool import RegisteredPool
from .scoped import GroupBuffers

__all__ = ["ColumnParallelOverlap", "GradScatter", "GroupBuffers", "RegisteredPool"]
