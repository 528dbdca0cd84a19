"""Prefill/decode disaggregation: moving KV pages between nodes."""
from .regions import Region, RegionTable
from .peers import PeerDirectory, Session

__all__ = ["Region", "RegionTable", "PeerDirectory", "Session"]
