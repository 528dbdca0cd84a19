from .manager import AsyncCheckpointer
from .staging import StagingPool

__all__ = ["AsyncCheckpointer", "StagingPool"]
