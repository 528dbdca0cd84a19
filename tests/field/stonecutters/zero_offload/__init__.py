"""Parameter and optimizer-state offload for sharded training."""
from .engine import OffloadEngine
from .pool import BlockArena, TransferPermits
from .swapper import ParamSwapper

__all__ = ["BlockArena", "OffloadEngine", "ParamSwapper", "TransferPermits"]
