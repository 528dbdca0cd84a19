from .engine import CacheEngine

__all__ = ["CacheEngine"]
