"""Activation offload: saved tensors go to host pages between forward and backward."""
from .hooks import OffloadHooks, offload
from .pages import PagePool
from .streams import CopyLanes

__all__ = ["OffloadHooks", "offload", "PagePool", "CopyLanes"]
