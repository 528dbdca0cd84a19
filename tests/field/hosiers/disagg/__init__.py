"""Prefill/decode disaggregation: KV transfer between engines."""
from .buffers import MetaSlots, RegisteredPool
from .decode import DecodeQueue
from .prefill import PrefillQueue

__all__ = ["DecodeQueue", "MetaSlots", "PrefillQueue", "RegisteredPool"]
