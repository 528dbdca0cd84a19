"""Cache of vision/audio encoder outputs, counted per content hash."""
from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Sequence


@dataclass
class EncoderEntry:
    key: str
    features: List[float]
    pins: int = 0

    @property
    def n_tokens(self) -> int:
        return len(self.features)


@dataclass
class MMRequest:
    rid: str
    image_keys: Sequence[str]
    pinned: Dict[int, EncoderEntry] = field(default_factory=dict)
    aborted: bool = False


class EncoderCache:
    """Pinned entries are never evicted. Every `pin` is paired with one `unpin`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: "OrderedDict[str, EncoderEntry]" = OrderedDict()

    def insert(self, key: str, features: List[float]) -> bool:
        while len(self._entries) >= self.capacity:
            victim = next((k for k, e in self._entries.items() if e.pins == 0), None)
            if victim is None:
                return False
            del self._entries[victim]
        self._entries[key] = EncoderEntry(key, features)
        return True

    def pin(self, key: str) -> Optional[EncoderEntry]:
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.pins += 1
        self._entries.move_to_end(key)
        return entry

    def unpin(self, entry: EncoderEntry) -> None:
        if entry.pins <= 0:
            raise ValueError(f"unpin of {entry.key} with no pins")
        entry.pins -= 1

    @contextlib.contextmanager
    def pinned(self, key: str) -> Iterator[Optional[EncoderEntry]]:
        entry = self.pin(key)  # clean: unpinned in the finally where there is one
        try:
            yield entry
        finally:
            if entry is not None:
                self.unpin(entry)


class EncoderScheduler:
    def __init__(self, cache: EncoderCache, token_budget: int) -> None:
        self.cache = cache
        self.token_budget = token_budget
        self.running: Dict[str, MMRequest] = {}

    def schedule(self, req: MMRequest) -> bool:
        """Pin all of a request's images, or none."""
        for i, key in enumerate(req.image_keys):
            entry = self.cache.pin(key)  # clean: near miss, a miss on a later image unpins those in the table
            if entry is None:
                self._unpin_all(req)
                return False
            req.pinned[i] = entry
        self.running[req.rid] = req
        return True

    def schedule_budgeted(self, req: MMRequest) -> bool:
        left = self.token_budget
        for i, key in enumerate(req.image_keys):
            entry = self.cache.pin(key)  # leak: the entry that exceeds the budget is not yet in the table when all are unpinned
            if entry is None:
                self._unpin_all(req)
                return False
            if entry.n_tokens > left:
                self._unpin_all(req)
                return False
            left -= entry.n_tokens
            req.pinned[i] = entry
        self.running[req.rid] = req
        return True

    def replace_image(self, req: MMRequest, index: int, key: str) -> bool:
        entry = self.cache.pin(key)  # clean: moved into the request's table in place of the old one, which is unpinned
        if entry is None:
            return False
        old = req.pinned.pop(index, None)
        if old is not None:
            self.cache.unpin(old)
        req.pinned[index] = entry
        return True

    def append_frames(self, req: MMRequest, keys: Sequence[str]) -> int:
        """Add video frames after the last pinned position."""
        last = max(req.pinned, default=-1)
        added = 0
        for key in keys:
            frame = self.cache.pin(key)  # leak: all frames are stored under the same index, so the earlier one is overwritten
            if frame is None:
                continue
            req.pinned[last + 1] = frame
            added += 1
        return added

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is not None:
            self._unpin_all(req)

    def _unpin_all(self, req: MMRequest) -> None:
        for entry in req.pinned.values():
            self.cache.unpin(entry)
        req.pinned.clear()


class FeatureReader:
    def __init__(self, cache: EncoderCache) -> None:
        self.cache = cache

    def mean(self, key: str) -> float:
        with self.cache.pinned(key) as entry:  # clean: context manager
            if entry is None or not entry.features:
                return 0.0
            return sum(entry.features) / len(entry.features)

    def _lookup(self, key: str) -> Optional[EncoderEntry]:
        return self.cache.pin(key)  # clean: handed to the caller

    def gather(self, keys: Sequence[str]) -> List[float]:
        out: List[float] = []
        for key in keys:
            entry = self._lookup(key)  # leak: features are copied out and the pin stays
            if entry is not None:
                out.extend(entry.features)
        return out

    def slice(self, key: str, start: int, stop: int) -> List[float]:
        entry = self._lookup(key)  # clean: unpinned after the copy
        if entry is None:
            return []
        part = entry.features[start:stop]
        self.cache.unpin(entry)
        return part

    def first_of(self, keys: Sequence[str]) -> Optional[EncoderEntry]:
        """The first cached entry, pinned for the caller."""
        for key in keys:
            entry = self.cache.pin(key)  # clean: near miss, only a hit leaves the loop and it is returned
            if entry is not None:
                return entry
        return None

    def widest_of(self, keys: Sequence[str]) -> Optional[EncoderEntry]:
        """The widest cached entry, pinned for the caller."""
        best = None
        for key in keys:
            entry = self.cache.pin(key)  # leak: best is rebound by a wider one and the narrower best keeps its pin
            if entry is None:
                continue
            if best is None or entry.n_tokens > best.n_tokens:
                best = entry
            else:
                self.cache.unpin(entry)
        return best

    def tallest_of(self, keys: Sequence[str]) -> float:
        best = None
        for key in keys:
            entry = self.cache.pin(key)  # clean: near miss, loser of each comparison is unpinned and the winner after the loop
            if entry is None:
                continue
            if best is not None and max(best.features) >= max(entry.features):
                self.cache.unpin(entry)
                continue
            if best is not None:
                self.cache.unpin(best)
            best = entry
        if best is None:
            return 0.0
        top = max(best.features)
        self.cache.unpin(best)
        return top

    def same(self, a: str, b: str) -> bool:
        left = self.cache.pin(a)  # clean: near miss, unpinned when present whether b is there or not
        right = self.cache.pin(b)  # leak: unpinned only where left is present
        equal = left is not None and right is not None and left.features == right.features
        if left is not None:
            self.cache.unpin(left)
            if right is not None:
                self.cache.unpin(right)
        return equal


if __name__ == "__main__":
    c = EncoderCache(8)
    for k in "abc":
        c.insert(k, [1.0, 2.0, float(ord(k))])
    s, r = EncoderScheduler(c, 100), FeatureReader(c)
    req = MMRequest("r0", ["a", "b"])
    assert s.schedule(req) and s.replace_image(req, 1, "c")
    s.finish("r0")
    print(r.mean("a"), r.slice("b", 0, 1), r.tallest_of("abc"), r.same("a", "b"), [e.pins for e in c._entries.values()])
