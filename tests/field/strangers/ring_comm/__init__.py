from .buffers import RingBuffers
from .exchange import RingExchange

__all__ = ["RingBuffers", "RingExchange"]
