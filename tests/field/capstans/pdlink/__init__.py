"""Disaggregated serving: prefill workers push KV chunks to decode workers."""
from .decode import DecodeSide
from .prefill import PrefillSide
from .staging import ChunkHeap, SendWindow

__all__ = ["ChunkHeap", "DecodeSide", "PrefillSide", "SendWindow"]
