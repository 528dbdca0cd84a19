"""Reading and writing of weight shards through a bounded handle table."""
from .handles import HandleTable, ReadHandle
from .manifest import Manifest
from .reader import ShardReader
from .writer import ShardWriter

__all__ = ["HandleTable", "Manifest", "ReadHandle", "ShardReader", "ShardWriter"]
