from .states import StatePool, StreamState
from .service import DetokService

__all__ = ["StatePool", "StreamState", "DetokService"]
