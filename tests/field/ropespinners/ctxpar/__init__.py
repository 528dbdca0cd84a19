"""Context-parallel attention: row buffers, ring transport, block attention, and the training loop around them."""
from .pools import EventBox, RowPool
from .trainer import LongTrainer

__all__ = ["EventBox", "RowPool", "LongTrainer"]
