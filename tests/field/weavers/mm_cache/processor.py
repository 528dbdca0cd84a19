"""Places image embeddings into requests."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .access import UrlCache
from .store import Embedding


@dataclass
class MMRequest:
    rid: str
    urls: List[str]
    embs: Dict[str, Embedding] = field(default_factory=dict)


class ImageProcessor:
    def __init__(self, cache: UrlCache) -> None:
        self.cache = cache

    def attach(self, req: MMRequest) -> bool:
        for url in req.urls:
            emb = self.cache.fetch_url(url)  # leak: a URL that occurs twice in the prompt overwrites its entry
            if emb is None:
                self.detach(req)
                return False
            req.embs[url] = emb
        return True

    def detach(self, req: MMRequest) -> None:
        for emb in req.embs.values():
            self.cache.drop_url(emb)
        req.embs.clear()

    def mean(self, url: str, emb: Optional[Embedding] = None) -> float:
        own = emb is None
        if own:
            emb = self.cache.fetch_url(url)  # clean: near miss, dropped in the finally under the same flag
            if emb is None:
                return 0.0
        try:
            return sum(emb.vec) / len(emb.vec)
        finally:
            if own:
                self.cache.drop_url(emb)

    def similarity(self, a: str, b: str) -> Optional[float]:
        ea = self.cache.fetch_url(a)  # clean: dropped on both ways
        if ea is None:
            return None
        eb = self.cache.fetch_url(b)  # leak: different widths return None after dropping only the first
        if eb is None or len(ea.vec) != len(eb.vec):
            self.cache.drop_url(ea)
            return None
        dot = sum(x * y for x, y in zip(ea.vec, eb.vec))
        self.cache.drop_url(ea)
        self.cache.drop_url(eb)
        return dot

    def preload(self, urls: List[str]) -> int:
        n = 0
        for url in urls:
            if self.cache.fetch_url(url):  # leak: the loop only counts hits and keeps no reference to drop
                n += 1
        return n
