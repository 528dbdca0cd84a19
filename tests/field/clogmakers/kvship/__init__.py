"""Ships KV cache blocks from prefill to decode instances."""
from .conn import Connection, ConnectionPool, PeerGone
from .memory import MemoryTable, OutOfRegions, Region
from .receiver import Receiver
from .sender import Sender

__all__ = ["Connection", "ConnectionPool", "MemoryTable", "OutOfRegions", "PeerGone", "Receiver", "Region", "Sender"]
