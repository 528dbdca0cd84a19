"""Prefill/decode disaggregation."""
from .decode import DecodeWorker
from .pages import PagePool
from .prefill import PrefillWorker

__all__ = ["DecodeWorker", "PagePool", "PrefillWorker"]
