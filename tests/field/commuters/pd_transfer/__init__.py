"""Prefill/decode disaggregation: moves KV pages between instances through transfer windows."""
from .receiver import DecodeReceiver
from .sender import PrefillSender
from .windows import TransferWindows

__all__ = ["DecodeReceiver", "PrefillSender", "TransferWindows"]
