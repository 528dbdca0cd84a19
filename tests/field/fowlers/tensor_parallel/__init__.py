"""Tensor-parallel inference pieces over one arena."""
from .arena import Arena, SpillPool

__all__ = ["Arena", "SpillPool"]
