"""KV transfer between prefill and decode workers over an RDMA-like fabric."""
from .fabric import Fabric, QueuePair
from .memory import MemoryRegistry, Region, BouncePool
from .sender import KVSender
from .receiver import KVReceiver

__all__ = ["Fabric", "QueuePair", "MemoryRegistry", "Region", "BouncePool", "KVSender", "KVReceiver"]
