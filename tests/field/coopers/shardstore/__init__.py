from .reader import ShardReader
from .store import ShardStore

__all__ = ["ShardReader", "ShardStore"]
