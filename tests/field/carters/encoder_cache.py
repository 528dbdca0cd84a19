"""Encoder output cache shared by the multimodal prefill and decode schedulers."""
from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Iterable, Optional


@dataclass
class Embedding:
    key: str
    rows: int
    data: list[float]
    refs: int = 0


@dataclass
class MMRequest:
    request_id: str
    images: list[bytes]
    placeholder_rows: list[int]
    embeddings: list[Embedding] = field(default_factory=list)


def image_key(image: bytes) -> str:
    return hashlib.sha256(image).hexdigest()[:24]


class EncoderCache:
    """Entries with refs > 0 are never evicted."""

    def __init__(self, capacity_rows: int) -> None:
        self.capacity_rows = capacity_rows
        self.used_rows = 0
        self._entries: OrderedDict[str, Embedding] = OrderedDict()
        self._lock = threading.Lock()

    def retain(self, key: str) -> Optional[Embedding]:
        with self._lock:
            emb = self._entries.get(key)
            if emb is None:
                return None
            emb.refs += 1
            self._entries.move_to_end(key)
            return emb

    def publish(self, key: str, rows: int, data: list[float]) -> Optional[Embedding]:
        """Insert and return a retained entry, or None when nothing can be evicted."""
        with self._lock:
            present = self._entries.get(key)
            if present is not None:
                present.refs += 1
                return present
            if not self._make_room(rows):
                return None
            emb = Embedding(key, rows, data, refs=1)
            self._entries[key] = emb
            self.used_rows += rows
            return emb

    def drop(self, emb: Embedding) -> None:
        with self._lock:
            if emb.refs <= 0:
                raise RuntimeError(f"{emb.key}: dropped more often than retained")
            emb.refs -= 1

    def _make_room(self, rows: int) -> bool:
        for key in list(self._entries):
            if self.used_rows + rows <= self.capacity_rows:
                break
            if self._entries[key].refs == 0:
                self.used_rows -= self._entries.pop(key).rows
        return self.used_rows + rows <= self.capacity_rows

    def live_refs(self) -> int:
        return sum(e.refs for e in self._entries.values())


class EncoderFrontend:
    def __init__(self, cache: EncoderCache, encode: Callable[[bytes], list[float]]) -> None:
        self._cache = cache
        self._encode = encode
        self.hits = 0
        self.misses = 0

    def lookup(self, image: bytes) -> Optional[Embedding]:
        key = image_key(image)
        hit = self._cache.retain(key)  # clean: handed to the caller
        if hit is not None:
            self.hits += 1
            return hit
        self.misses += 1
        data = self._encode(image)
        return self._cache.publish(key, len(data), data)  # clean: handed to the caller

    def attach(self, request: MMRequest) -> bool:
        """Resolve every image of the request; all or nothing."""
        for image, expected in zip(request.images, request.placeholder_rows):
            emb = self.lookup(image)  # leak: the row mismatch detaches only those already appended
            if emb is None:
                self.detach(request)
                return False
            if emb.rows != expected:
                self.detach(request)
                return False
            request.embeddings.append(emb)
        return True

    def detach(self, request: MMRequest) -> None:
        while request.embeddings:
            self._cache.drop(request.embeddings.pop())

    def is_cached(self, image: bytes) -> bool:
        return self._cache.retain(image_key(image)) is not None  # leak: probing raises the count, result is thrown away

    def row_count(self, image: bytes) -> Optional[int]:
        emb = self._cache.retain(image_key(image))  # clean: dropped after the read
        if emb is None:
            return None
        rows = emb.rows
        self._cache.drop(emb)
        return rows

    def warm(self, images: Iterable[bytes]) -> int:
        warmed = 0
        for image in images:
            key = image_key(image)
            emb = self._cache.retain(key)  # leak: a hit continues without drop
            if emb is not None:
                continue
            data = self._encode(image)
            emb = self._cache.publish(key, len(data), data)  # clean: dropped below, None breaks
            if emb is None:
                break
            self._cache.drop(emb)
            warmed += 1
        return warmed

    def pooled(self, image: bytes, dims: int) -> list[float]:
        emb = self.lookup(image)  # leak: copied out, the entry stays retained
        if emb is None:
            return [0.0] * dims
        vec = list(emb.data[:dims])
        norm = sum(v * v for v in vec) ** 0.5 or 1.0
        return [v / norm for v in vec]

    def energy(self, image: bytes) -> float:
        emb = self.lookup(image)  # clean: near miss, returns inside try, finally drops when there is one
        try:
            if emb is None:
                return 0.0
            if not emb.data:
                return 0.0
            return sum(v * v for v in emb.data) / len(emb.data)
        finally:
            if emb is not None:
                self._cache.drop(emb)


class CompareSession:
    """Keeps one reference image resident while candidates are scored against it."""

    def __init__(self, frontend: EncoderFrontend, cache: EncoderCache) -> None:
        self._frontend = frontend
        self._cache = cache
        self._reference: Optional[Embedding] = None

    def set_reference(self, image: bytes) -> bool:
        emb = self._frontend.lookup(image)  # clean: near miss, the field's old value is dropped before it is overwritten
        if self._reference is not None:
            self._cache.drop(self._reference)
        self._reference = emb
        return emb is not None

    def score(self, image: bytes) -> float:
        if self._reference is None:
            return 0.0
        other = self._frontend.lookup(image)  # clean: dropped after the dot product
        if other is None:
            return 0.0
        total = sum(a * b for a, b in zip(self._reference.data, other.data))
        self._cache.drop(other)
        return total

    def close(self) -> None:
        if self._reference is not None:
            self._cache.drop(self._reference)
            self._reference = None


def main() -> None:
    cache = EncoderCache(64)
    front = EncoderFrontend(cache, lambda b: [float(x) for x in b[:8]])
    req = MMRequest("r0", [b"abcdefgh", b"ijklmnop"], [8, 8])
    assert front.attach(req)
    front.detach(req)
    session = CompareSession(front, cache)
    session.set_reference(b"abcdefgh")
    session.set_reference(b"ijklmnop")
    session.score(b"abcdefgh")
    session.close()
    front.energy(b"qrstuvwx")
    print("live refs", cache.live_refs())


if __name__ == "__main__":
    main()
