from .engine import Engine
from .scheduler import Scheduler

__all__ = ["Engine", "Scheduler"]
