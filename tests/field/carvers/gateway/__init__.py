from .conn import Connection, ConnectionPool
from .service import FeatureService

__all__ = ["Connection", "ConnectionPool", "FeatureService"]
