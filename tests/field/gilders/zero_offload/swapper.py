"""Moves parameter and optimizer partitions between host memory and an NVMe directory."""
from __future__ import annotations

import logging
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Deque, Dict, List, Optional, Tuple

import numpy as np

from .pinned import PinnedBuffer, PinnedPool

log = logging.getLogger(__name__)


class PartitionSwapper:
    def __init__(self, pool: PinnedPool, folder: str, workers: int = 2):
        self.pool = pool
        self.folder = folder
        self._exec = ThreadPoolExecutor(max_workers=workers)
        self._writes: Deque[Tuple[Future, PinnedBuffer]] = deque()
        self._reads: Dict[str, Tuple[Future, PinnedBuffer]] = {}
        self.resident: Dict[str, np.ndarray] = {}

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name.replace("/", "_") + ".bin")

    def _write(self, name: str, buf: PinnedBuffer, numel: int) -> None:
        buf.view[:numel].tofile(self._path(name))

    def _read(self, name: str, buf: PinnedBuffer, numel: int) -> int:
        data = np.fromfile(self._path(name), dtype=np.float32, count=numel)
        buf.view[: data.size] = data
        return data.size

    # -- writes ----------------------------------------------------------
    def swap_out(self, name: str, data: np.ndarray) -> None:
        buf = self.pool.checkout()  # clean: near miss, queued with its write; rebound only when it was None
        if buf is None:
            self.drain_writes()
            buf = self.pool.checkout(timeout=5.0)  # clean: queued with its write, drain_writes checks it in
        if buf is None:
            raise RuntimeError("pinned pool exhausted")
        buf.view[: data.size] = data
        self._writes.append((self._exec.submit(self._write, name, buf, data.size), buf))
        self.resident.pop(name, None)

    def drain_writes(self) -> None:
        while self._writes:
            fut, buf = self._writes.popleft()
            try:
                fut.result()
            finally:
                self.pool.checkin(buf)

    # -- reads -----------------------------------------------------------
    def prefetch(self, name: str, numel: int) -> bool:
        if name in self._reads or name in self.resident:
            return False
        buf = self.pool.checkout()  # clean: kept in the read table until complete or cancel
        if buf is None:
            return False
        self._reads[name] = (self._exec.submit(self._read, name, buf, numel), buf)
        return True

    def complete(self, name: str) -> Optional[np.ndarray]:
        entry = self._reads.pop(name, None)
        if entry is None:
            return self.resident.get(name)
        fut, buf = entry
        try:
            n = fut.result()
            self.resident[name] = buf.view[:n].copy()
        finally:
            self.pool.checkin(buf)
        return self.resident[name]

    def cancel_reads(self) -> None:
        for name in list(self._reads):
            fut, buf = self._reads.pop(name)
            if not fut.cancel():
                fut.exception()
            self.pool.checkin(buf)

    def fetch(self, name: str, numel: int) -> PinnedBuffer:
        """Read a partition synchronously; the caller checks the buffer in."""
        buf = self.pool.checkout(timeout=5.0)  # clean: handed to the caller
        if buf is None:
            raise RuntimeError("pinned pool exhausted")
        self._read(name, buf, numel)
        return buf

    def peek(self, name: str, numel: int) -> np.ndarray:
        buf = self.fetch(name, numel)  # leak: copied and dropped
        return buf.view[:numel].copy()

    def swap_in(self, wanted: List[Tuple[str, int]]) -> int:
        done = 0
        for name, numel in wanted:
            if name in self.resident:
                continue
            with self.pool.borrowed() as buf:  # clean: near miss, continue and break leave through the context manager
                if not os.path.exists(self._path(name)):
                    continue
                if self._read(name, buf, numel) < numel:
                    break
                self.resident[name] = buf.view[:numel].copy()
                done += 1
        return done

    def compact(self, old: str, new: str, numel: int) -> bool:
        pair = self.pool.checkout_pair()  # leak: the short-read return checks in only the source buffer
        if pair is None:
            return False
        src, dst = pair
        if self._read(old, src, numel) != numel:
            self.pool.checkin(src)
            return False
        np.copyto(dst.view, src.view)
        self._write(new, dst, numel)
        self.pool.checkin(src)
        self.pool.checkin(dst)
        return True

    def close(self) -> None:
        self.drain_writes()
        self.cancel_reads()
        self._exec.shutdown()
