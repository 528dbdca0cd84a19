"""Multimodal front end: frame arenas, feature leases, request assembly."""
from .arena import FrameArena
from .leases import FeatureLeases
from .pipeline import Pipeline

__all__ = ["FrameArena", "FeatureLeases", "Pipeline"]
