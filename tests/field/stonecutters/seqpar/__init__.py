"""Sequence parallelism: all-to-all attention with pooled exchange tensors."""
from .layers import UlyssesAttention
from .tensors import ExchangeTensors
from .transport import Exchange

__all__ = ["Exchange", "ExchangeTensors", "UlyssesAttention"]
