"""Optimizer state paged to NVMe. Bounded I/O depth, a pinned frame per resident page."""
from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable

import torch

log = logging.getLogger("opt_paging")

FRAME = 4 << 20


class FrameSet:
    """Pinned frames, numbered. `used` is the bitmap."""

    def __init__(self, n: int) -> None:
        self.mem = torch.empty(n, FRAME, dtype=torch.uint8, pin_memory=True)
        self.used = bytearray(n)
        self.lock = threading.Lock()

    def occupy(self) -> int:
        """A frame number, or -1."""
        with self.lock:
            i = self.used.find(0)
            if i >= 0:
                self.used[i] = 1
            return i

    def leave(self, i: int) -> None:
        with self.lock:
            self.used[i] = 0


class IODepth:
    """Limits the requests in flight on a device."""

    def __init__(self, depth: int) -> None:
        self._sem = threading.Semaphore(depth)

    def __enter__(self) -> "IODepth":
        self._sem.acquire()  # clean: released in __exit__
        return self

    def __exit__(self, *exc) -> None:
        self._sem.release()

    def enter_nowait(self) -> bool:
        return self._sem.acquire(blocking=False)  # clean: handed to the caller, who calls leave()

    def enter_for(self, seconds: float) -> bool:
        t0 = time.monotonic()
        got = self._sem.acquire(timeout=seconds)  # leak: a permit that came late is reported as not taken
        if time.monotonic() - t0 > seconds:
            return False
        return got

    def leave(self) -> None:
        self._sem.release()


class PageFile:
    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)  # clean: closed by close()

    def read_into(self, page: int, dst: torch.Tensor) -> None:
        os.preadv(self.fd, [dst.numpy()], page * FRAME)

    def write_from(self, page: int, src: torch.Tensor) -> None:
        os.pwrite(self.fd, src.numpy(), page * FRAME)

    def close(self) -> None:
        os.close(self.fd)


class StatePager:
    def __init__(self, frames: FrameSet, file: PageFile, depth: IODepth, workers: int = 4) -> None:
        self.frames = frames
        self.file = file
        self.depth = depth
        self.resident: OrderedDict[int, int] = OrderedDict()
        self.dirty: set[int] = set()
        self.pool = ThreadPoolExecutor(workers)

    def _evict_one(self) -> bool:
        if not self.resident:
            return False
        page, frame = self.resident.popitem(last=False)
        if page in self.dirty:
            with self.depth:
                self.file.write_from(page, self.frames.mem[frame])
            self.dirty.discard(page)
        self.frames.leave(frame)
        return True

    def fault(self, page: int) -> torch.Tensor | None:
        frame = self.resident.get(page)
        if frame is not None:
            self.resident.move_to_end(page)
            return self.frames.mem[frame]
        frame = self.frames.occupy()  # clean: -1 on a failed attempt, else kept in self.resident
        while frame < 0:
            if not self._evict_one():
                return None
            frame = self.frames.occupy()  # clean: kept in self.resident, left by _evict_one
        with self.depth:
            self.file.read_into(page, self.frames.mem[frame])
        self.resident[page] = frame
        return self.frames.mem[frame]

    def readahead(self, pages: list[int]) -> int:
        n = 0
        for page in pages:
            frame = self.frames.occupy()  # leak: a page that is resident already skips to the next one
            if frame < 0:
                break
            if page in self.resident:
                continue
            with self.depth:
                self.file.read_into(page, self.frames.mem[frame])
            self.resident[page] = frame
            n += 1
        return n

    def try_write(self, page: int) -> bool:
        if not self.depth.enter_nowait():  # leak: not left when the page is no longer resident
            return False
        frame = self.resident.get(page)
        if frame is None:
            return False
        self.file.write_from(page, self.frames.mem[frame])
        self.dirty.discard(page)
        self.depth.leave()
        return True

    def write_async(self, page: int) -> Future | None:
        frame = self.resident.get(page)
        if frame is None or not self.depth.enter_nowait():  # clean: near miss, left by the future's done callback
            return None
        fut = self.pool.submit(self.file.write_from, page, self.frames.mem[frame])
        fut.add_done_callback(lambda _f: self.depth.leave())
        self.dirty.discard(page)
        return fut

    def snapshot(self, page: int, tries: int = 3) -> torch.Tensor | None:
        """Consistent copy of a page that the optimizer may be writing."""
        src = self.resident.get(page)
        if src is None:
            return None
        for _ in range(tries):
            tmp = self.frames.occupy()  # leak: a torn copy is tried again with another frame
            if tmp < 0:
                return None
            self.frames.mem[tmp].copy_(self.frames.mem[src])
            if not torch.equal(self.frames.mem[tmp], self.frames.mem[src]):
                log.debug("page %d changed while it was copied", page)
                continue
            out = self.frames.mem[tmp].clone()
            self.frames.leave(tmp)
            return out
        return None

    def update(self, page: int, step: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
        """Runs step(state, scratch); the scratch becomes the page when it returns True."""
        cur = self.fault(page)  # clean: near miss, the frame stays owned by self.resident
        if cur is None:
            return False
        scratch = self.frames.occupy()  # leak: not left when step() turns the update down
        if scratch < 0:
            return step(cur, cur)
        if not step(cur, self.frames.mem[scratch]):
            return False
        old, self.resident[page] = self.resident[page], scratch
        self.frames.leave(old)
        self.dirty.add(page)
        return True

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        while self._evict_one():
            pass
        self.file.close()
