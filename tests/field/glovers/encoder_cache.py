"""Cache of vision encoder outputs with pinned entries."""
from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass
class Entry:
    key: str
    rows: int
    data: list[float] | None = None
    holders: int = 0


class EncoderCache:
    """Rows are a fixed budget. hold() pins an entry, let_go() unpins it."""

    def __init__(self, rows: int):
        self.free_rows = rows
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._mu = threading.RLock()

    def hold(self, key: str) -> Entry | None:
        with self._mu:
            entry = self._entries.get(key)
            if entry is not None:
                entry.holders += 1
                self._entries.move_to_end(key)
            return entry

    def create(self, key: str, rows: int) -> Entry | None:
        """A fresh entry, held once; None if there is no room."""
        with self._mu:
            while self.free_rows < rows and self._evict_one():
                pass
            if self.free_rows < rows:
                return None
            self.free_rows -= rows
            entry = Entry(key, rows, holders=1)
            self._entries[key] = entry
            return entry

    def let_go(self, entry: Entry) -> None:
        with self._mu:
            entry.holders -= 1

    def _evict_one(self) -> bool:
        for key, entry in self._entries.items():
            if entry.holders == 0:
                del self._entries[key]
                self.free_rows += entry.rows
                return True
        return False


@dataclass
class MMRequest:
    rid: int
    images: list[str]
    held: list[Entry] = field(default_factory=list)
    thumbs: dict[str, Entry] = field(default_factory=dict)


class EncoderRunner:
    def __init__(self, cache: EncoderCache, encoder):
        self.cache = cache
        self.encoder = encoder
        self.requests: dict[int, MMRequest] = {}
        self.pinned_system: Entry | None = None

    def _lookup_or_encode(self, key: str) -> Entry | None:
        entry = self.cache.hold(key)  # clean: returned to the caller
        if entry is not None:
            return entry
        entry = self.cache.create(key, self.encoder.rows(key))  # clean: returned to the caller
        if entry is None:
            return None
        entry.data = self.encoder.encode(key)
        return entry

    def admit(self, req: MMRequest) -> bool:
        for key in req.images:
            entry = self._lookup_or_encode(key)  # clean: in req.held, release() lets go of all
            if entry is None:
                self.release(req)
                return False
            req.held.append(entry)
        self.requests[req.rid] = req
        return True

    def release(self, req: MMRequest) -> None:
        for entry in req.held:
            self.cache.let_go(entry)
        req.held = []

    def finish(self, rid: int) -> None:
        req = self.requests.pop(rid, None)
        if req is None:
            return
        self.release(req)
        req.thumbs.clear()

    def add_thumb(self, rid: int, key: str) -> bool:
        req = self.requests[rid]
        if key in req.thumbs:
            return True
        entry = self.cache.hold(key)  # leak: finish clears thumbs without letting go
        if entry is None:
            return False
        req.thumbs[key] = entry
        return True

    def is_encoded(self, key: str) -> bool:
        entry = self.cache.hold(key)  # leak: only tested for None and data
        return entry is not None and entry.data is not None

    def is_encoded_now(self, key: str) -> bool:
        entry = self.cache.hold(key)  # clean: let go before the answer
        if entry is None:
            return False
        ready = entry.data is not None
        self.cache.let_go(entry)
        return ready

    def prefill_rows(self, req: MMRequest, budget: int) -> list[float]:
        rows: list[float] = []
        for key in req.images:
            entry = self._lookup_or_encode(key)  # leak: break over the budget leaves the entry held
            if entry is None:
                continue
            if len(rows) + entry.rows > budget:
                break
            rows.extend(entry.data)
            self.cache.let_go(entry)
        return rows

    def gather(self, keys: list[str]) -> list[float]:
        entries = [self._lookup_or_encode(k) for k in keys]  # clean: near miss, those not None are let go below
        rows: list[float] = []
        for entry in entries:
            if entry is not None:
                rows.extend(entry.data)
        for entry in filter(None, entries):
            self.cache.let_go(entry)
        return rows

    def gather_strict(self, keys: list[str]) -> list[float] | None:
        entries = [self._lookup_or_encode(k) for k in keys]  # leak: one None returns and the others stay held
        if any(e is None for e in entries):
            return None
        rows = [x for e in entries for x in e.data]
        for entry in entries:
            self.cache.let_go(entry)
        return rows

    def set_system_image(self, key: str) -> bool:
        entry = self._lookup_or_encode(key)  # clean: near miss, the entry before is let go and clear ends the last
        if entry is None:
            return False
        if self.pinned_system is not None:
            self.cache.let_go(self.pinned_system)
        self.pinned_system = entry
        return True

    def clear_system_image(self) -> None:
        if self.pinned_system is not None:
            self.cache.let_go(self.pinned_system)
            self.pinned_system = None

    def blend(self, a: str, b: str, reuse: bool) -> list[float]:
        left = self._lookup_or_encode(a)  # clean: let go at the end or when the right one is missing
        if left is None:
            return []
        right = left if reuse else self._lookup_or_encode(b)  # clean: near miss, let go unless it is left itself
        if right is None:
            self.cache.let_go(left)
            return []
        mixed = [(x + y) / 2 for x, y in zip(left.data, right.data)]
        if right is not left:
            self.cache.let_go(right)
        self.cache.let_go(left)
        return mixed

    def transfer(self, src_rid: int, dst_rid: int) -> int:
        """Move what one request holds to another, e.g. when a chat goes on."""
        src, dst = self.requests[src_rid], self.requests[dst_rid]
        moved = len(src.held)
        dst.held.extend(src.held)
        src.held = []
        return moved

    def prewarm(self, keys: list[str]) -> int:
        warmed = 0
        for key in keys:
            if self.is_encoded_now(key):
                continue
            entry = self.cache.create(key, self.encoder.rows(key))  # leak: encoded and left held for ever
            if entry is None:
                break
            entry.data = self.encoder.encode(key)
            warmed += 1
        return warmed
