"""Database gateway of the order service."""
from .pool import ConnectionPool, PoolTimeout
from .session import Session, SessionFactory

__all__ = ["ConnectionPool", "PoolTimeout", "Session", "SessionFactory"]
