"""Shared-memory pipe between the API process, the tokenizer workers and the engine."""
from .engine_side import EngineInbox
from .frontend import Frontend
from .segments import SegmentPool, SegmentRef

__all__ = ["EngineInbox", "Frontend", "SegmentPool", "SegmentRef"]
