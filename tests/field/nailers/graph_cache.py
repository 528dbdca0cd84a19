"""CUDA graph cache: a captured graph per padded batch size, reference counted, with private pools."""
from __future__ import annotations

import bisect
import threading
from contextlib import contextmanager
from typing import Callable, Iterator, Optional

import torch

Runner = Callable[[torch.Tensor], torch.Tensor]


class GraphEntry:
    def __init__(self, batch: int, mempool: int) -> None:
        self.batch = batch
        self.mempool = mempool
        self.refs = 0
        self.replays = 0

    def incref(self) -> "GraphEntry":
        self.refs += 1
        return self

    def decref(self) -> None:
        self.refs -= 1

    def replay(self) -> None:
        self.replays += 1


class MempoolIds:
    """Private pool handles; the driver allows a small number."""

    def __init__(self, limit: int) -> None:
        self._ids = list(range(limit))

    def new_id(self) -> int:
        if not self._ids:
            raise MemoryError("no private pools left")
        return self._ids.pop()

    def retire_id(self, ident: int) -> None:
        self._ids.append(ident)


class GraphCache:
    def __init__(self, sizes: list[int], ids: MempoolIds) -> None:
        self.sizes = sorted(sizes)
        self.ids = ids
        self.entries: dict[int, GraphEntry] = {}
        self.capture_lock = threading.Lock()
        self.broken: set[int] = set()

    def pad(self, batch: int) -> Optional[int]:
        at = bisect.bisect_left(self.sizes, batch)
        return self.sizes[at] if at < len(self.sizes) else None

    def _capture(self, size: int) -> Optional[GraphEntry]:
        ident = self.ids.new_id()  # clean: retired when capture fails, else owned by the entry (evict)
        entry = GraphEntry(size, ident)
        if size in self.broken:
            self.ids.retire_id(ident)
            return None
        self.entries[size] = entry
        return entry

    def acquire(self, batch: int) -> Optional[GraphEntry]:
        size = self.pad(batch)
        if size is None:
            return None
        self.capture_lock.acquire()  # clean: released in finally
        try:
            entry = self.entries.get(size) or self._capture(size)
            return entry.incref() if entry is not None else None  # clean: handed to the caller
        finally:
            self.capture_lock.release()

    def evict(self) -> int:
        gone = [e for e in self.entries.values() if e.refs == 0]
        for entry in gone:
            del self.entries[entry.batch]
            self.ids.retire_id(entry.mempool)
        return len(gone)

    def mark_broken(self, batch: int) -> bool:
        self.capture_lock.acquire()  # leak: batches over the largest size return with the lock taken
        size = self.pad(batch)
        if size is None:
            return False
        self.broken.add(size)
        self.capture_lock.release()
        return True

    def recapture(self, size: int) -> bool:
        """Throw the graph of this size away and capture it with a new private pool."""
        old = self.entries.pop(size, None)
        if old is not None and old.refs:
            self.entries[size] = old
            return False
        if old is not None:
            self.ids.retire_id(old.mempool)
        ident = self.ids.new_id()  # leak: _capture takes an id of its own, this one is only logged
        print(f"recapturing {size} near pool {ident}")
        return self._capture(size) is not None

    def try_capture_idle(self) -> bool:
        if not self.capture_lock.acquire(blocking=False):  # clean: near miss, released when it was got
            return False
        missing = [s for s in self.sizes if s not in self.entries and s not in self.broken]
        if missing:
            self._capture(missing[0])
        self.capture_lock.release()
        return bool(missing)


@contextmanager
def graph_for(cache: GraphCache, batch: int) -> Iterator[Optional[GraphEntry]]:
    entry = cache.acquire(batch)  # clean: decref after the block
    try:
        yield entry
    finally:
        if entry is not None:
            entry.decref()


class LayerwiseReplay:
    """Holds one entry per layer group between begin() and end()."""

    def __init__(self, cache: GraphCache, groups: int) -> None:
        self.cache = cache
        self.groups = groups
        self.held: list[GraphEntry] = []

    def begin(self, batch: int) -> bool:
        for _ in range(self.groups):
            entry = self.cache.acquire(batch)  # clean: in held, end() decrefs them, also on failure
            if entry is None:
                self.end()
                return False
            self.held.append(entry)
        return True

    def end(self) -> None:
        while self.held:
            self.held.pop().decref()


class ModelRunner:
    def __init__(self, cache: GraphCache, eager: Runner) -> None:
        self.cache = cache
        self.eager = eager
        self.last: Optional[GraphEntry] = None
        self.misses = 0

    def execute(self, x: torch.Tensor) -> torch.Tensor:
        with graph_for(self.cache, x.shape[0]) as entry:  # clean: context manager decrefs
            if entry is None:
                self.misses += 1
                return self.eager(x)
            entry.replay()
            return x

    def execute_sticky(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the entry of the last step; most steps have the same batch size."""
        want = self.cache.pad(x.shape[0])
        if self.last is None or self.last.batch != want:
            if self.last is not None:
                self.last.decref()
            self.last = self.cache.acquire(x.shape[0])  # clean: near miss, decref above or in reset
        if self.last is None:
            return self.eager(x)
        self.last.replay()
        return x

    def reset(self) -> None:
        if self.last is not None:
            self.last.decref()
            self.last = None

    def execute_prefill(self, x: torch.Tensor, use_graph: bool) -> torch.Tensor:
        entry = self.cache.acquire(x.shape[0])  # leak: without use_graph it is held but never decref'd
        if use_graph and entry is not None:
            entry.replay()
            entry.decref()
            return x
        self.misses += 1
        return self.eager(x)

    def warmup(self, batches: list[int]) -> int:
        captured = 0
        for batch in batches:
            entry = self.cache.acquire(batch)  # leak: entries replayed before are passed over by continue
            if entry is None:
                continue
            if entry.replays > 0:
                continue
            entry.replay()
            entry.decref()
            captured += 1
        return captured
