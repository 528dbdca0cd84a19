"""A small speculative-decoding engine: draft, verify, commit."""
from .engine import Engine, EngineConfig
from .pages import PagePool, PagesExhausted
from .request import GenRequest, Status

__all__ = ["Engine", "EngineConfig", "GenRequest", "PagePool", "PagesExhausted", "Status"]
