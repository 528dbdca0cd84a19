from .batch import BatchAssembler
from .pool import Connection, ConnectionPool
from .reader import FeatureReader
from .wal import WalReplayer

__all__ = ["BatchAssembler", "Connection", "ConnectionPool", "FeatureReader", "WalReplayer"]
