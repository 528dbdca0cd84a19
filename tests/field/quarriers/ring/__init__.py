from .attention import RingAttention, ring_backward, ring_forward
from .comm import RingComm
from .pool import TensorPool

__all__ = ["RingAttention", "RingComm", "TensorPool", "ring_backward", "ring_forward"]
