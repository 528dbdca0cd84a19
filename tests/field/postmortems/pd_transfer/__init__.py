"""Prefill/decode disaggregation: KV pages travel from a prefill to a decode engine."""
from .base import PageLedger, TransferRole
from .decode import DecodeSide
from .prefill import PrefillSide, handoff

__all__ = ["PageLedger", "TransferRole", "DecodeSide", "PrefillSide", "handoff"]
