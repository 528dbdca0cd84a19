"""Block-sparse attention layouts: tile pool, counted layouts, layout cache, launcher."""
from .cache import LayoutCache
from .launch import Launcher
from .tiles import TilePool

__all__ = ["LayoutCache", "Launcher", "TilePool"]
