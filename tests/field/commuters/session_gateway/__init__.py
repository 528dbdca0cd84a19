"""Session gateway: routes chat sessions to workers that hold their KV cache."""
from .routes import SessionRoutes
from .workers import WorkerPark

__all__ = ["SessionRoutes", "WorkerPark"]
