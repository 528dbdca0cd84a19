from .buffers import SyncBuffer, SyncBufferPool
from .sync import WeightSync
from .worker import RolloutWorker

__all__ = ["SyncBuffer", "SyncBufferPool", "WeightSync", "RolloutWorker"]
