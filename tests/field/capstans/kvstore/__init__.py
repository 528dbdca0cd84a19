"""Tiered KV store: pages on the device, pages on the host, tables of requests."""
from .engine import Engine
from .pages import PagePool, PagesExhausted
from .tables import Table, TableBook

__all__ = ["Engine", "PagePool", "PagesExhausted", "Table", "TableBook"]
