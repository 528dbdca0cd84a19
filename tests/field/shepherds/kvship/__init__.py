"""Shipping of KV caches from prefill to decode workers."""
from .regions import RegionTable, Region, OutOfRegions
from .prefill import PrefillSide
from .decode import DecodeSide
from .wire import Wire, PeerGone

__all__ = ["RegionTable", "Region", "OutOfRegions", "PrefillSide", "DecodeSide", "Wire", "PeerGone"]
