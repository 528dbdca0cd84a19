"""Reference-counted cache of multimodal encoder outputs."""
from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Callable, Optional


@dataclass
class EncoderEntry:
    digest: str
    size: int
    value: Any
    holders: int = 0


@dataclass
class MMRequest:
    rid: str
    images: list[bytes]
    entries: list[EncoderEntry] = field(default_factory=list)
    current: Optional[EncoderEntry] = None
    focus: Optional[EncoderEntry] = None


class EncoderCache:
    def __init__(self, capacity: int, encode: Callable[[bytes], Any]) -> None:
        self.capacity = capacity
        self.encode = encode
        self.used = 0
        self._entries: dict[str, EncoderEntry] = {}

    def _evict(self, need: int) -> bool:
        for digest in [d for d, e in self._entries.items() if e.holders == 0]:
            if self.capacity - self.used >= need:
                break
            self.used -= self._entries.pop(digest).size
        return self.capacity - self.used >= need

    def retain(self, image: bytes) -> Optional[EncoderEntry]:
        digest = hashlib.sha1(image).hexdigest()
        entry = self._entries.get(digest)
        if entry is None:
            if not self._evict(len(image)):
                return None
            entry = EncoderEntry(digest, len(image), self.encode(image))
            self._entries[digest] = entry
            self.used += entry.size
        entry.holders += 1
        return entry

    def relinquish(self, entry: EncoderEntry) -> None:
        entry.holders -= 1

    def value_of(self, image: bytes) -> Any:
        entry = self.retain(image)  # leak: the value leaves, the count stays up
        return None if entry is None else entry.value

    def size_of(self, image: bytes) -> int:
        entry = self.retain(image)  # clean: dropped before the return
        if entry is None:
            return 0
        size = entry.size
        self.relinquish(entry)
        return size


class MMScheduler:
    def __init__(self, cache: EncoderCache) -> None:
        self.cache = cache
        self.running: dict[str, MMRequest] = {}

    def admit(self, req: MMRequest) -> bool:
        for image in req.images:
            entry = self.cache.retain(image)  # clean: on the request, dropped again when one is refused
            if entry is None:
                self._drop(req)
                return False
            req.entries.append(entry)
        self.running[req.rid] = req
        return True

    def _drop(self, req: MMRequest) -> None:
        for entry in req.entries:
            self.cache.relinquish(entry)
        req.entries = []
        if req.current is not None:
            self.cache.relinquish(req.current)
            req.current = None
        if req.focus is not None:
            self.cache.relinquish(req.focus)
            req.focus = None

    def advance(self, req: MMRequest, image: bytes) -> bool:
        req.current = self.cache.retain(image)  # leak: the entry of the image before is overwritten
        return req.current is not None

    def refocus(self, req: MMRequest, image: bytes) -> bool:
        if req.focus is not None:
            self.cache.relinquish(req.focus)
        req.focus = self.cache.retain(image)  # clean: near miss, the entry before was dropped, _drop() drops the last
        return req.focus is not None

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is not None:
            self._drop(req)


class PreviewService:
    def __init__(self, cache: EncoderCache) -> None:
        self.cache = cache
        self.shown: list[EncoderEntry] = []
        self.thumbs: dict[str, EncoderEntry] = {}

    def show(self, images: list[bytes], limit: int) -> list[Any]:
        for image in images:
            entry = self.cache.retain(image)  # clean: near miss, in shown before the break, hide() drops them all
            if entry is None:
                continue
            self.shown.append(entry)
            if len(self.shown) == limit:
                break
        return [e.value for e in self.shown]

    def hide(self) -> None:
        for entry in self.shown:
            self.cache.relinquish(entry)
        self.shown = []

    def thumb(self, name: str, image: bytes) -> Any:
        entry = self.thumbs.get(name)
        if entry is None:
            entry = self.cache.retain(image)  # leak: trim() deletes the older entries without dropping them
            if entry is None:
                return None
            self.thumbs[name] = entry
        return entry.value

    def trim(self, keep: int) -> None:
        for name in list(self.thumbs)[:-keep]:
            del self.thumbs[name]

    def close(self) -> None:
        for entry in self.thumbs.values():
            self.cache.relinquish(entry)
        self.thumbs.clear()

    def similar(self, a: bytes, b: bytes, dist: Callable[[Any, Any], float]) -> float:
        left = self.cache.retain(a)  # clean: near miss, dropped under its own None test
        right = self.cache.retain(b)  # clean: likewise
        result = 1.0
        if left is not None and right is not None:
            result = dist(left.value, right.value)
        if left is not None:
            self.cache.relinquish(left)
        if right is not None:
            self.cache.relinquish(right)
        return result
