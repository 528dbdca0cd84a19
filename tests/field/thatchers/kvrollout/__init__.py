from .blocks import BlockManager
from .engine import Engine
from .scheduler import Scheduler, Seq

__all__ = ["BlockManager", "Engine", "Scheduler", "Seq"]
