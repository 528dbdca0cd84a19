"""Tile cache for the satellite segmentation service."""
from .lease import TileLease, leased
from .pool import TilePool
from .service import TileService

__all__ = ["TileLease", "TilePool", "TileService", "leased"]
