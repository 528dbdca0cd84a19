from .agent import TransferAgent
from .regions import RegionTable
from .scheduler import ConnectorScheduler
from .worker import ConnectorWorker

__all__ = ["ConnectorScheduler", "ConnectorWorker", "RegionTable", "TransferAgent"]
