from .trainer import RolloutTrainer
from .weights import WeightSync
from .workers import WorkerPool
