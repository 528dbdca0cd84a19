"""Keeps model weights on a serving node: memory grants, loaded models, adapters."""
from .hub import Hub
from .memory import MemoryLedger
from .registry import Registry

__all__ = ["Hub", "MemoryLedger", "Registry"]
