"""Reference-counted encoder outputs, shared by the requests which show the same image."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional


class Embedding:
    def __init__(self, key: str, vec: List[float]) -> None:
        self.key = key
        self.vec = vec
        self.refs = 0


class EmbeddingStore:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._mu = threading.Lock()
        self._items: Dict[str, Embedding] = {}

    def retain(self, key: str) -> Optional[Embedding]:
        with self._mu:
            emb = self._items.get(key)
            if emb is not None:
                emb.refs += 1
            return emb

    def release(self, emb: Embedding) -> None:
        with self._mu:
            emb.refs -= 1

    def publish(self, key: str, vec: List[float]) -> bool:
        with self._mu:
            if len(self._items) >= self.capacity and not self._evict():
                return False
            self._items.setdefault(key, Embedding(key, vec))
            return True

    def _evict(self) -> bool:
        for key, emb in self._items.items():
            if emb.refs == 0:
                del self._items[key]
                return True
        return False
