"""A small multi-modal serving loop: pixel arena, requests, batches, workers."""
from .arena import PixelArena, Region
from .engine import Engine
from .request import MMRequest, RequestTable

__all__ = ["Engine", "MMRequest", "PixelArena", "Region", "RequestTable"]
