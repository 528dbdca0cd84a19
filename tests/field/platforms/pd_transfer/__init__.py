"""Disaggregated serving: moves KV blocks from prefill to decode workers."""
from .link import BlockPool, CreditWindow, Transfer
from .receiver import DecodeReceiver
from .sender import PrefillSender

__all__ = ["BlockPool", "CreditWindow", "Transfer", "DecodeReceiver", "PrefillSender"]
