"""Disaggregated prefill/decode: KV pages move from prefill to decode workers."""
from .decode import DecodeWorker
from .pages import MetaBuffers, PageAllocator
from .prefill import PrefillWorker
from .types import Handoff, ServeRequest

__all__ = ["DecodeWorker", "Handoff", "MetaBuffers", "PageAllocator", "PrefillWorker", "ServeRequest"]
