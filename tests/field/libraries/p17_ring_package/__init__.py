"""Ring attention with lent exchange buffers."""
from .attention import RingAttention
from .buffers import BufferBank, PairBuffer
from .exchange import RingExchange

__all__ = ["RingAttention", "BufferBank", "PairBuffer", "RingExchange"]
