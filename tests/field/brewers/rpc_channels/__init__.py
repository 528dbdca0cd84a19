from .pool import Channel, ChannelPool, PoolClosed, RpcError
from .client import Client, Stub
from .session import ChannelScope, LenientScope, ReplicaGroup

__all__ = ["Channel", "ChannelPool", "ChannelScope", "Client", "LenientScope", "PoolClosed", "ReplicaGroup", "RpcError", "Stub"]
