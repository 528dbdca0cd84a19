"""Activation checkpointing with host offload."""
from .hooks import OffloadHooks
from .pinned import PinnedPool
from .session import OffloadSession
from .streams import StreamPool

__all__ = ["OffloadHooks", "OffloadSession", "PinnedPool", "StreamPool"]
