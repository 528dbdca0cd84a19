from .buffers import TransferBuffer, TransferBufferPool
from .engine import PrefillSender, DecodeReceiver

__all__ = ["TransferBuffer", "TransferBufferPool", "PrefillSender", "DecodeReceiver"]
