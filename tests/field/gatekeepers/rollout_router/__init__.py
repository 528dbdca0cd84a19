"""Routes generation requests of the rollout workers to inference engines."""
from .engines import Engine, EngineSet, NoEngine, Ticket
from .router import EngineError, Router
from .worker import RolloutWorker

__all__ = ["Engine", "EngineSet", "EngineError", "NoEngine", "RolloutWorker", "Router", "Ticket"]
