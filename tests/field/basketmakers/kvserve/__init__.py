"""Disaggregated KV serving: block pool, per-request tables, engine and transfer."""
from .engine import Engine
from .pages import PagePool

__all__ = ["Engine", "PagePool"]
