from .kvpool import KVPool, Pinned
from .ring import RingAttention

__all__ = ["KVPool", "Pinned", "RingAttention"]
