from __future__ import annotations

from typing import Iterator, Sequence

from .handles import HandleCache
from .prefetch import Prefetcher


class ShardLoader:
    def __init__(self, cache: HandleCache, prefetcher: Prefetcher, paths: Sequence[str]) -> None:
        self.cache = cache
        self.prefetcher = prefetcher
        self.paths = list(paths)

    def __iter__(self) -> Iterator[bytes]:
        for path in self.paths:
            h = self.cache.use(path)  # clean: near miss, unused in finally also when the generator is closed early
            if h is None:
                continue
            try:
                for i in range(len(h)):
                    yield h.record(i)
            finally:
                self.cache.unuse(h)

    def total(self) -> int:
        n = 0
        for path in self.paths:
            h = self.cache.use(path)  # leak: an empty shard continues and stays in use
            if h is None:
                continue
            if len(h) == 0:
                continue
            n += len(h)
            self.cache.unuse(h)
        return n

    def first(self, limit: int) -> list[bytes]:
        out: list[bytes] = []
        for path in self.paths:
            h = self.cache.use(path)  # clean: near miss, unused before the break
            if h is None:
                continue
            out.extend(h.record(i) for i in range(min(len(h), limit - len(out))))
            self.cache.unuse(h)
            if len(out) >= limit:
                break
        return out

    def longest(self) -> bytes:
        best = b""
        for path in self.paths:
            h = self.cache.use(path)  # clean: unused at the end of each round
            if h is None:
                continue
            for i in range(len(h)):
                rec = h.record(i)
                best = rec if len(rec) > len(best) else best
            self.cache.unuse(h)
        return best
