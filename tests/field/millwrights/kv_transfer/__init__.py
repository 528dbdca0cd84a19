"""Moves KV blocks from prefill ranks to decode ranks through registered staging buffers."""
from .staging import StagingPool, Region
from .sender import PrefillSender
from .receiver import DecodeReceiver

__all__ = ["StagingPool", "Region", "PrefillSender", "DecodeReceiver"]
