"""Prefill to decode transfer of KV pages over registered memory."""
from .pipeline import DecodeSide, PrefillSide
from .regions import RegionPool

__all__ = ["DecodeSide", "PrefillSide", "RegionPool"]
