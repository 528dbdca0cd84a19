"""Speculative decoding: a draft model proposes, the target model verifies."""

from .engine import SpecEngine
from .pools import CapacityError, DraftSlots, PageLedger

__all__ = ["CapacityError", "DraftSlots", "PageLedger", "SpecEngine"]
