from .engine import PrefillEngine

__all__ = ["PrefillEngine"]
