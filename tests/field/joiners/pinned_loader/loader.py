from __future__ import annotations

import queue
import threading
from typing import Callable, Iterator, List, Optional, Sequence

from .slabs import Slab, SlabArena, SlabLease
from .sources import read_records

_END = object()


class PinnedLoader:
    """Worker threads fill slabs, the consumer restores each one when it has been copied."""

    def __init__(self, arena: SlabArena, paths: Sequence[str], batch: int, drop_last: bool = True,
                 keep: Optional[Callable[[bytes], bool]] = None):
        self.arena = arena
        self.paths = list(paths)
        self.batch = batch
        self.drop_last = drop_last
        self.keep = keep or (lambda s: True)
        self.ready: "queue.Queue[object]" = queue.Queue()

    def _fill(self, samples: Sequence[bytes]) -> Optional[Slab]:
        slab = self.arena.lease(1.0)  # leak: None is returned when a sample does not fit
        if slab is None:
            return None
        for s in samples:
            if not slab.append(s):
                return None
        return slab

    def _fill_prefix(self, samples: Sequence[bytes]) -> Optional[Slab]:
        with SlabLease(self.arena) as lease:  # clean: near miss, with, detached only on success
            if lease.slab is None:
                return None
            for s in samples:
                if not lease.slab.append(s):
                    return None
            return lease.detach()

    def _work(self, path: str) -> None:
        pending: List[bytes] = []
        for sample in read_records(path):
            if not self.keep(sample):
                continue
            pending.append(sample)
            if len(pending) == self.batch:
                slab = self._fill(pending)  # clean: queued, the consumer restores it
                if slab is not None:
                    self.ready.put(slab)
                pending = []
        if pending and not self.drop_last:
            tail = self._fill_prefix(pending)  # clean: None-checked, queued
            if tail is not None:
                self.ready.put(tail)
        self.ready.put(_END)

    def __iter__(self) -> Iterator[bytes]:
        threads = [threading.Thread(target=self._work, args=(p,), daemon=True) for p in self.paths]
        for t in threads:
            t.start()
        left = len(threads)
        while left:
            item = self.ready.get()
            if item is _END:
                left -= 1
                continue
            data = bytes(item.mem[: item.length])
            self.arena.restore(item)
            yield data
        for t in threads:
            t.join()

    def batches(self) -> Iterator[Slab]:
        """Yields slabs; each is valid until the next one is asked for."""
        for path in self.paths:
            pending: List[bytes] = []
            for sample in read_records(path):
                pending.append(sample)
                if len(pending) < self.batch:
                    continue
                slab = self._fill_prefix(pending)  # clean: restored when the consumer comes back or closes
                pending = []
                if slab is None:
                    continue
                try:
                    yield slab
                finally:
                    self.arena.restore(slab)

    def peek(self, samples: Sequence[bytes]) -> bytes:
        slab = self._fill(samples)  # leak: bytes taken, slab dropped
        return bytes(slab.mem[: slab.length]) if slab is not None else b""

    def shutdown(self) -> None:
        while True:
            try:
                item = self.ready.get_nowait()
            except queue.Empty:
                return
            if item is not _END:
                self.arena.restore(item)
