from .buffers import DispatchBuffers, ExchangeBuffer
from .dispatch import Dispatcher
from .layer import ExpertParallelLayer
from .permits import TokenPermits

__all__ = ["DispatchBuffers", "Dispatcher", "ExchangeBuffer", "ExpertParallelLayer", "TokenPermits"]
