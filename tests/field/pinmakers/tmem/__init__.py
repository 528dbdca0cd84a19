"""tmem: reference-counted scratch tensors for fused attention operators."""
from .cells import Cell, CellStore
from .frames import Frame, frame
from .layer import FusedBlock

__all__ = ["Cell", "CellStore", "Frame", "frame", "FusedBlock"]
