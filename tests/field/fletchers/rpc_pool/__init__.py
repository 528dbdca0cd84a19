from .client import ShardClient
from .conn import Connection, ConnectFailed
from .pool import ConnectionPool, PooledConnection

__all__ = ["Connection", "ConnectFailed", "ConnectionPool", "PooledConnection", "ShardClient"]
