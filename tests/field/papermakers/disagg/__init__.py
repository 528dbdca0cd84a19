"""Prefill/decode disaggregation: KV hand-over between two engines."""
from .pools import BlockStore, BootstrapRooms, StagingRing
from .receiver import DecodeReceiver
from .registry import RoomRegistry
from .sender import PrefillSender

__all__ = [
    "BlockStore",
    "BootstrapRooms",
    "StagingRing",
    "DecodeReceiver",
    "PrefillSender",
    "RoomRegistry",
]
