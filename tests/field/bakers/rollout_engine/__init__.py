from .memory import Lane, LanePool
from .request import Request, RequestState
from .engine import RolloutEngine

__all__ = ["Lane", "LanePool", "Request", "RequestState", "RolloutEngine"]
