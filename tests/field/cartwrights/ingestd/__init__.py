"""Ingestion service: documents in, token shards and metadata rows out."""

from .pools import BufferPool, SessionPool
from .service import IngestService, Settings

__all__ = ["BufferPool", "IngestService", "SessionPool", "Settings"]
