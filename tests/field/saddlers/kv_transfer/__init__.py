"""KV transfer between prefill and decode nodes."""
from .node import TransferNode
from .staging import StagingBuffer, StagingPool

__all__ = ["StagingBuffer", "StagingPool", "TransferNode"]
