"""Paged KV cache: stores, tables, chunked prefill and the engine loop."""

from .engine import Engine
from .stores import DeviceStore, HostStore
from .table import TableSet

__all__ = ["DeviceStore", "Engine", "HostStore", "TableSet"]
