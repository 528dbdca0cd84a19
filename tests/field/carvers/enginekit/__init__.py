from .engine import Engine
from .slots import Row, RowTable

__all__ = ["Engine", "Row", "RowTable"]
