from .router import Router
from .workers import WorkerSet

__all__ = ["Router", "WorkerSet"]
