"""KV transfer between prefill and decode replicas over RDMA."""
from .channel import Channel, ChannelError, Fabric
from .receiver import KVReceiver
from .registry import MemoryRegistry, Region
from .sender import KVSender

__all__ = ["Channel", "ChannelError", "Fabric", "KVReceiver", "KVSender", "MemoryRegistry", "Region"]
