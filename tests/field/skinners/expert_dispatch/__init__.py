"""Token dispatch for expert parallelism."""
from .capacity import CapacityPool, Seat
from .layer import ExpertLayer
from .router import Router

__all__ = ["CapacityPool", "ExpertLayer", "Router", "Seat"]
