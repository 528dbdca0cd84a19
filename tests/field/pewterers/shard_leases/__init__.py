from .coordinator import LeaseBoard, ShardLease
from .rebalance import Rebalancer
from .snapshot import SnapshotWriter
from .worker import ShardWorker

__all__ = ["LeaseBoard", "ShardLease", "Rebalancer", "SnapshotWriter", "ShardWorker"]
