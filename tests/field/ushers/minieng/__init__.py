from .core import EngineCore

__all__ = ["EngineCore"]
