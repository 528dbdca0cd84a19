"""Multimodal encoder cache: image embeddings are held by count while requests still read them."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterator, List, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


class Embedding:
    def __init__(self, key: str, length: int) -> None:
        self.key = key
        self.length = length
        self.holders = 0
        self.ready = False
        self.values: List[float] = [0.0] * length


class EncoderCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: "OrderedDict[str, Embedding]" = OrderedDict()
        self._lock = threading.Lock()

    def hold(self, key: str) -> Optional[Embedding]:
        """Raise the count of a cached embedding; None on a miss."""
        with self._lock:
            emb = self._entries.get(key)
            if emb is None:
                return None
            emb.holders += 1
            self._entries.move_to_end(key)
            return emb

    def drop(self, emb: Embedding) -> None:
        with self._lock:
            emb.holders -= 1

    def hold_or_create(self, key: str, length: int) -> Embedding:
        emb = self.hold(key)  # clean: handed to the caller
        if emb is not None:
            return emb
        with self._lock:
            while len(self._entries) >= self.capacity and self._evict_one():
                pass
            emb = self._entries.setdefault(key, Embedding(key, length))
            emb.holders += 1
            return emb

    def _evict_one(self) -> bool:
        for key, emb in self._entries.items():
            if emb.holders == 0:
                del self._entries[key]
                return True
        return False

    def holders(self) -> int:
        return sum(e.holders for e in self._entries.values())


@dataclass
class MMRequest:
    rid: str
    images: List[str]
    embeddings: List[Embedding] = field(default_factory=list)
    cover: Optional[Embedding] = None
    finished: bool = False


class EncoderRunner:
    def __init__(self, cache: EncoderCache, length: int = 4) -> None:
        self.cache = cache
        self.length = length
        self.waiting: Dict[str, MMRequest] = {}
        self.by_image: Dict[str, Embedding] = {}
        self.recent: Dict[str, Embedding] = {}
        self.hooks: List[Callable[[], None]] = []

    def _encode(self, emb: Embedding) -> bool:
        if emb.key.startswith("bad"):
            return False
        emb.values = [float(len(emb.key))] * emb.length
        emb.ready = True
        return True

    def attach(self, req: MMRequest) -> bool:
        for image in req.images:
            emb = self.cache.hold_or_create(image, self.length)  # leak: an undecodable image returns before it joins the request
            if not emb.ready and not self._encode(emb):
                return False
            req.embeddings.append(emb)
        self.waiting[req.rid] = req
        return True

    def attach_atomic(self, req: MMRequest) -> bool:
        held: List[Embedding] = []
        for image in req.images:
            emb = self.cache.hold_or_create(image, self.length)  # clean: near miss, appended before the check, all dropped on failure
            held.append(emb)
            if not emb.ready and not self._encode(emb):
                for e in held:
                    self.cache.drop(e)
                return False
        req.embeddings.extend(held)
        self.waiting[req.rid] = req
        return True

    def detach(self, rid: str) -> None:
        req = self.waiting.pop(rid, None)
        if req is None:
            return
        while req.embeddings:
            self.cache.drop(req.embeddings.pop())
        if req.cover is not None:
            self.cache.drop(req.cover)
            req.cover = None

    def set_cover(self, req: MMRequest, image: str) -> bool:
        emb = self.cache.hold(image)  # clean: near miss, an earlier cover is dropped, detach drops this one
        if emb is None:
            return False
        if req.cover is not None:
            self.cache.drop(req.cover)
        req.cover = emb
        return True

    def lengths(self, images: Sequence[str]) -> List[int]:
        result = []
        for image in images:
            emb = self.cache.hold(image)  # clean: None is 0, otherwise dropped in the same turn
            if emb is None:
                result.append(0)
                continue
            result.append(emb.length)
            self.cache.drop(emb)
        return result

    def total_ready(self, images: Sequence[str]) -> int:
        total = 0
        for image in images:
            emb = self.cache.hold(image)  # leak: one that is not ready continues past drop
            if emb is None or not emb.ready:
                continue
            total += emb.length
            self.cache.drop(emb)
        return total

    def remember(self, image: str) -> None:
        emb = self.cache.hold(image)  # leak: remembering an image again overwrites the entry with a second count
        if emb is not None:
            self.recent[image] = emb

    def remember_once(self, image: str) -> None:
        emb = self.cache.hold(image)  # clean: near miss, a second hold of a remembered image is dropped
        if emb is None:
            return
        if image in self.by_image:
            self.cache.drop(emb)
            return
        self.by_image[image] = emb

    def forget(self, image: str) -> None:
        for table in (self.by_image, self.recent):
            emb = table.pop(image, None)
            if emb is not None:
                self.cache.drop(emb)

    def defer(self, image: str, use: Callable[[Embedding], None]) -> bool:
        emb = self.cache.hold(image)  # clean: near miss, the hook drops it when run_hooks calls it
        if emb is None:
            return False

        def hook() -> None:
            try:
                use(emb)
            finally:
                self.cache.drop(emb)

        self.hooks.append(hook)
        return True

    def defer_ready(self, image: str, use: Callable[[Embedding], None]) -> bool:
        emb = self.cache.hold(image)  # leak: the hook drops only a ready embedding
        if emb is None:
            return False

        def hook() -> None:
            if emb.ready:
                use(emb)
                self.cache.drop(emb)

        self.hooks.append(hook)
        return True

    def run_hooks(self) -> int:
        hooks, self.hooks = self.hooks, []
        for hook in hooks:
            hook()
        return len(hooks)

    def best_match(self, images: Sequence[str]) -> Optional[Embedding]:
        """The longest cached embedding, held for the caller."""
        best: Optional[Embedding] = None
        for image in images:
            emb = self.cache.hold(image)  # clean: near miss, the loser of each comparison is dropped, the winner returned
            if emb is None:
                continue
            if best is None or emb.length > best.length:
                best, emb = emb, best
            if emb is not None:
                self.cache.drop(emb)
        return best

    def first_match(self, images: Sequence[str]) -> Optional[Embedding]:
        found: Optional[Embedding] = None
        for image in images:
            emb = self.cache.hold(image)  # leak: a later hit overwrites found, whose count stays up
            if emb is not None and emb.ready:
                found = emb
            elif emb is not None:
                self.cache.drop(emb)
        return found

    def preview(self, images: Sequence[str]) -> List[float]:
        emb = self.best_match(images)  # leak: its values are copied out and the hold stays
        if emb is None:
            return []
        return list(emb.values)

    def average(self, images: Sequence[str]) -> float:
        emb = self.best_match(images)  # clean: dropped in finally
        if emb is None:
            return 0.0
        try:
            return sum(emb.values) / emb.length
        finally:
            self.cache.drop(emb)

    def iter_held(self, images: Sequence[str]) -> Iterator[Embedding]:
        for image in images:
            emb = self.cache.hold(image)  # leak: any_ready stops at the yield, what follows is not run
            if emb is None:
                continue
            yield emb
            self.cache.drop(emb)

    def any_ready(self, images: Sequence[str]) -> bool:
        return any(emb.ready for emb in self.iter_held(images))  # clean: the lease belongs to the generator, the fault is there


if __name__ == "__main__":
    runner = EncoderRunner(EncoderCache(4))
    r = MMRequest("r", ["cat", "dogs"])
    assert runner.attach_atomic(r) and runner.set_cover(r, "cat")
    assert runner.lengths(["cat", "none"]) == [4, 0]
    assert runner.average(["dogs"]) == 4.0
    seen: List[str] = []
    runner.defer("cat", lambda e: seen.append(e.key))
    assert runner.run_hooks() == 1
    runner.detach("r")
    assert runner.cache.holders() == 0
