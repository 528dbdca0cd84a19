"""Layers over the store: lookup with encode on a miss, and lookup by URL."""
from __future__ import annotations

from typing import Callable, Dict, List, Optional

from .store import Embedding, EmbeddingStore

Encoder = Callable[[str], List[float]]


class EncodingCache:
    def __init__(self, store: EmbeddingStore, encode: Encoder) -> None:
        self.store = store
        self.encode = encode

    def fetch(self, key: str) -> Optional[Embedding]:
        """Retained; `drop` it."""
        emb = self.store.retain(key)  # clean: handed to the caller
        if emb is None and self.store.publish(key, self.encode(key)):
            emb = self.store.retain(key)  # clean: near miss, rebinds only a None
        return emb

    def drop(self, emb: Embedding) -> None:
        self.store.release(emb)


class UrlCache:
    def __init__(self, inner: EncodingCache) -> None:
        self.inner = inner
        self.alias: Dict[str, str] = {}

    def fetch_url(self, url: str) -> Optional[Embedding]:
        emb = self.inner.fetch(self.alias.get(url, url))  # clean: handed to the caller
        return emb

    def drop_url(self, emb: Embedding) -> None:
        self.inner.drop(emb)

    def width(self, url: str) -> int:
        emb = self.fetch_url(url)  # leak: only the length leaves, the reference stays
        return len(emb.vec) if emb else 0
