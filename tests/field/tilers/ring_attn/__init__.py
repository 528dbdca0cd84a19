"""Ring attention over a context-parallel process group."""
from .attention import ring_forward, striped_forward, zigzag_forward
from .backward import ring_backward
from .buffers import CommBufferPool
from .comm import RingComm

__all__ = ["CommBufferPool", "RingComm", "ring_forward", "striped_forward", "zigzag_forward", "ring_backward"]
