from .client import WorkerClient
from .pool import Session, SessionPool

__all__ = ["Session", "SessionPool", "WorkerClient"]
