"""Embedding server: tensor pool, encoder, cached sessions, worker loop."""
from . import buffers, encoder, worker
from .sessions import SessionTable

__all__ = ["SessionTable", "buffers", "encoder", "worker"]
