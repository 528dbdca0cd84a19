"""Tiered cache of adapter weights: host pages over disk slots."""
from .pages import PagePool
from .slots import SlotCounter
from .tier import TierCache

__all__ = ["PagePool", "SlotCounter", "TierCache"]
