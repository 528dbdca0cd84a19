"""Mixture-of-experts weight residency: host store, device cache and dispatch."""
from .cache import ExpertCache
from .dispatch import Dispatcher
from .store import FramePool

__all__ = ["ExpertCache", "Dispatcher", "FramePool"]
