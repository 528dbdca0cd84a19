from .trainer import RolloutTrainer
from .workers import WorkerPool

__all__ = ["RolloutTrainer", "WorkerPool"]
