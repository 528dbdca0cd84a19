"""A small paged-attention engine: page store, block tables, step loop."""
from .engine import Engine
from .pages import PageStore
from .tables import BlockTables

__all__ = ["Engine", "PageStore", "BlockTables"]
