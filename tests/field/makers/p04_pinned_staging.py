"""Pinned host staging for asynchronous host-to-device copies."""
from __future__ import annotations

import contextlib
import heapq
import queue
import threading
from typing import Dict, Iterable, Iterator, List, Optional, Tuple

import torch


class PinnedArena:
    """Best-fit pinned buffers kept in a heap ordered by size."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self._heap: List[Tuple[int, int]] = []
        self._store: Dict[int, torch.Tensor] = {}
        self._cond = threading.Condition()
        self._bytes = 0
        self._next = 0

    def borrow(self, nbytes: int, block: bool = True) -> Optional[torch.Tensor]:
        with self._cond:  # clean: with block
            while True:
                skipped = []
                found = None
                while self._heap:
                    size, key = heapq.heappop(self._heap)  # clean: near miss, too small ones are pushed back below
                    if size >= nbytes:
                        found = key
                        break
                    skipped.append((size, key))
                for item in skipped:
                    heapq.heappush(self._heap, item)
                if found is not None:
                    return self._store.pop(found)  # clean: returned to the borrower
                if self._bytes + nbytes <= self.limit:
                    self._bytes += nbytes
                    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                if not block:
                    return None
                self._cond.wait()

    def restore(self, buf: torch.Tensor) -> None:
        with self._cond:  # clean: with block
            self._next += 1
            self._store[self._next] = buf
            heapq.heappush(self._heap, (buf.numel(), self._next))
            self._cond.notify()

    @contextlib.contextmanager
    def borrowed(self, nbytes: int) -> Iterator[torch.Tensor]:
        buf = self.borrow(nbytes)  # clean: restored in finally
        try:
            yield buf
        finally:
            self.restore(buf)


class AsyncUploader:
    """Copies on a side stream, restoring staging memory once the event is done."""

    def __init__(self, arena: PinnedArena, device: torch.device) -> None:
        self.arena = arena
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._inflight: "queue.SimpleQueue[Tuple[torch.cuda.Event, torch.Tensor]]" = queue.SimpleQueue()

    def upload(self, src: torch.Tensor) -> torch.Tensor:
        stage = self.arena.borrow(src.nbytes)  # clean: goes to _inflight, reaped by flush()
        view = stage[: src.nbytes].view(src.dtype).view(src.shape)
        view.copy_(src)
        with torch.cuda.stream(self.stream):
            dst = view.to(self.device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.stream)
        self._inflight.put((done, stage))
        return dst

    def try_upload(self, src: torch.Tensor) -> Optional[torch.Tensor]:
        stage = self.arena.borrow(src.nbytes, block=False)  # leak: the non-contiguous path uploads directly and forgets it
        if stage is None:
            return None
        if not src.is_contiguous():
            return src.to(self.device)
        view = stage[: src.nbytes].view(src.dtype).view(src.shape)
        view.copy_(src)
        dst = view.to(self.device)
        self.arena.restore(stage)
        return dst

    def flush(self) -> None:
        while not self._inflight.empty():
            done, stage = self._inflight.get()  # clean: restored after its event
            done.synchronize()
            self.arena.restore(stage)

    def poll(self) -> int:
        finished = 0
        while not self._inflight.empty():
            done, stage = self._inflight.get()  # leak: an unfinished entry is taken out and not put back
            if not done.query():
                break
            self.arena.restore(stage)
            finished += 1
        return finished


def prefetch(batches: Iterable[torch.Tensor], arena: PinnedArena, device) -> Iterator[torch.Tensor]:
    prev: Optional[torch.Tensor] = None
    try:
        for batch in batches:
            stage = arena.borrow(batch.nbytes)  # clean: near miss, restored as prev one round later or in finally
            stage[: batch.nbytes].copy_(batch.reshape(-1).view(torch.uint8))
            dst = stage[: batch.nbytes].to(device, non_blocking=True)
            if prev is not None:
                torch.cuda.current_stream().synchronize()
                arena.restore(prev)
            prev = stage
            yield dst.view(batch.dtype).view(batch.shape)
    finally:
        if prev is not None:
            torch.cuda.current_stream().synchronize()
            arena.restore(prev)


def gather_pages(pages: List[torch.Tensor], arena: PinnedArena, device) -> List[torch.Tensor]:
    out = []
    stage = None
    for page in pages:
        if stage is None or stage.numel() < page.nbytes:
            stage = arena.borrow(page.nbytes)  # leak: growing rebinds stage without restoring the small one
        stage[: page.nbytes].copy_(page.reshape(-1).view(torch.uint8))
        out.append(stage[: page.nbytes].to(device))
    if stage is not None:
        arena.restore(stage)
    return out


def load_shard(path: str, nbytes: int, arena: PinnedArena, device) -> Optional[torch.Tensor]:
    f = open(path, "rb")  # leak: not closed when the shard is short
    with arena.borrowed(nbytes) as stage:  # clean: near miss, with block covers the early return
        got = f.readinto(memoryview(stage.numpy())[:nbytes])
        if got < nbytes:
            return None
        dst = stage[:nbytes].to(device)
    f.close()
    return dst
