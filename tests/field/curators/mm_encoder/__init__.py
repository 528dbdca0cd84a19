"""Multimodal encoder side of the engine: feature cache, shared-memory inputs, encoder scheduling."""
from .cache import EncoderCache, FeatureEntry
from .engine import EncoderEngine, MMRequest
from .shm import SegmentStore, SegmentRef

__all__ = ["EncoderCache", "EncoderEngine", "FeatureEntry", "MMRequest", "SegmentRef", "SegmentStore"]
