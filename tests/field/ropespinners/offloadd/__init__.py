"""Offload daemon: keeps cold tensors of training jobs in host frames and on disk."""
from .api import Service
from .frames import FrameArena
from .store import PageStore

__all__ = ["Service", "FrameArena", "PageStore"]
