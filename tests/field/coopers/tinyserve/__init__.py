from .engine import Engine
from .request import Request, Status
from .scheduler import Scheduler

__all__ = ["Engine", "Request", "Scheduler", "Status"]
