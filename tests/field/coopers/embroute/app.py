from __future__ import annotations

import hashlib
from typing import Any

from .batcher import Batcher
from .cache import Entry, VectorCache
from .limits import Budget


def _key(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class App:
    def __init__(self, cache: VectorCache, batcher: Batcher, budget: Budget) -> None:
        self.cache = cache
        self.batcher = batcher
        self.budget = budget
        self.watch: dict[str, Entry] = {}

    async def handle(self, body: dict[str, Any]) -> tuple[int, Any]:
        size = sum(len(t) for t in body["input"])
        if not self.budget.claim(size):  # clean: near miss, all answers pass the finally
            return 429, None
        try:
            if body.get("stream"):
                return 400, "no streaming"
            return 200, await self._embed(body["input"])
        finally:
            self.budget.restore(size)

    async def handle_raw(self, payload: bytes) -> tuple[int, Any]:
        if not self.budget.claim(len(payload)):  # leak: bytes that are no UTF-8 are answered with 400 and the claim is kept
            return 429, None
        try:
            text = payload.decode()
        except UnicodeDecodeError:
            return 400, "utf-8 expected"
        vecs = await self._embed([text])
        self.budget.restore(len(payload))
        return 200, vecs

    async def handle_stripped(self, text: str) -> tuple[int, Any]:
        if not self.budget.claim(len(text)):  # leak: the text is stripped in between, so less is restored than was claimed
            return 429, None
        text = text.strip()
        vecs = await self.batcher.submit([text])
        self.budget.restore(len(text))
        return 200, vecs

    async def _embed(self, texts: list[str]) -> list[list[float]]:
        by_key = {_key(t): t for t in texts}
        hits, missing = self.cache.lookup(list(by_key))  # clean: near miss, all hits are unpinned after they were copied
        vecs = {e.key: list(e.vector) for e in hits}
        for e in hits:
            self.cache.unpin(e)
        if missing:
            fresh = await self.batcher.submit([by_key[k] for k in missing])
            for k, v in zip(missing, fresh):
                self.cache.insert(k, v)
                vecs[k] = v
        return [vecs.get(_key(t), []) for t in texts]

    async def similarity(self, a: str, b: str) -> float | None:
        hits, missing = self.cache.lookup([_key(a), _key(b)])  # leak: if one of the two is missing the other one stays pinned
        if missing:
            return None
        x, y = hits
        score = sum(p * q for p, q in zip(x.vector, y.vector))
        self.cache.unpin(x)
        self.cache.unpin(y)
        return score

    def nearest_watched(self, text: str) -> str | None:
        probe = self.cache.pin(_key(text))  # clean: near miss, the loop breaks and the entry is unpinned behind it
        if probe is None:
            return None
        found = None
        for name, e in self.watch.items():
            if sum(p * q for p, q in zip(probe.vector, e.vector)) > 0.95:
                found = name
                break
        self.cache.unpin(probe)
        return found

    def watch_text(self, name: str, text: str) -> bool:
        e = self.cache.pin(_key(text))  # clean: near miss, the entry watched before under the name is unpinned first
        if e is None:
            return False
        self.unwatch(name)
        self.watch[name] = e
        return True

    def unwatch(self, name: str) -> None:
        old = self.watch.pop(name, None)
        if old is not None:
            self.cache.unpin(old)
