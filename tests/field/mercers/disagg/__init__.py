"""Disaggregated prefill: moving KV pages from prefill to decode instances."""
from .pools import PeerConnections, StagingPool, TransferTable
from .receiver import KVReceiver
from .sender import KVSender

__all__ = ["PeerConnections", "StagingPool", "TransferTable", "KVReceiver", "KVSender"]
