from .memory import RegionPool, TransferEngine
from .prefill import PrefillWorker
from .decode import DecodeWorker

__all__ = ["RegionPool", "TransferEngine", "PrefillWorker", "DecodeWorker"]
