from .driver import RolloutDriver
from .weights import WeightSync
from .workers import Worker, WorkerPool

__all__ = ["RolloutDriver", "WeightSync", "Worker", "WorkerPool"]
