"""A small parameter server: versioned shards, wire buffers, push/pull clients."""
from .buffers import VersionPins, WireBuffers
from .client import PullClient
from .server import ShardServer

__all__ = ["PullClient", "ShardServer", "VersionPins", "WireBuffers"]
