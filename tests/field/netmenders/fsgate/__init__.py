"""Gateway to the feature store: connections, sessions over them, loaders and exports."""
from . import conns
from .export import Exporter
from .loader import BatchLoader
from .session import Session, open_session

__all__ = ["BatchLoader", "Exporter", "Session", "conns", "open_session"]
