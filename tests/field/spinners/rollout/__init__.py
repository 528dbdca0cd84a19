from .engine import RolloutEngine

__all__ = ["RolloutEngine"]
