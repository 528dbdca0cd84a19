"""Prefill/decode disaggregation: KV pages are filled on one worker and handed to another."""
from .decode import DecodeWorker
from .pages import PagePool, RoomTable
from .prefill import PrefillWorker

__all__ = ["DecodeWorker", "PagePool", "PrefillWorker", "RoomTable"]
