"""Pinned staging buffers and a prefetching batch loader."""
from __future__ import annotations

import queue
import threading
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch


class PinnedPool:
    """Fixed set of page-locked byte buffers handed out by index."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        pin = torch.cuda.is_available()
        self._bufs = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin) for _ in range(count)]
        self._idle: List[int] = list(range(count))
        self._cond = threading.Condition()

    def take(self, timeout: Optional[float] = None) -> Optional[int]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._idle), timeout):
                return None
            return self._idle.pop()

    def take_quiet(self, min_idle: int) -> Optional[int]:
        with self._cond:
            if not self._idle:
                return None
            idx = self._idle.pop()  # leak: when too few stay idle the popped index is dropped
            if len(self._idle) < min_idle:
                return None
            return idx

    def give(self, idx: int) -> None:
        with self._cond:
            self._idle.append(idx)
            self._cond.notify()

    def view(self, idx: int, nbytes: int) -> torch.Tensor:
        return self._bufs[idx][:nbytes]

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        idx = self.take()  # clean: near miss, given back in the finally of the context manager
        try:
            yield idx
        finally:
            self.give(idx)


class Batch:
    def __init__(self, pool: PinnedPool, slot: int, nbytes: int, index: int) -> None:
        self.pool = pool
        self.slot: Optional[int] = slot
        self.nbytes = nbytes
        self.index = index

    def tensor(self) -> torch.Tensor:
        assert self.slot is not None
        return self.pool.view(self.slot, self.nbytes)

    def to_device(self, device: torch.device) -> torch.Tensor:
        out = self.tensor().to(device, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return out

    def release(self) -> None:
        if self.slot is not None:
            self.pool.give(self.slot)
            self.slot = None


class PrefetchLoader:
    def __init__(
        self,
        read: Callable[[int, torch.Tensor], int],
        indices: Sequence[int],
        pool: PinnedPool,
        depth: int = 4,
        skip_empty: bool = True,
    ) -> None:
        self.read = read
        self.indices = indices
        self.pool = pool
        self.skip_empty = skip_empty
        self._out: "queue.Queue[Optional[Batch]]" = queue.Queue(depth)
        self._stop = threading.Event()
        self._failed: Dict[int, str] = {}
        self._thread = threading.Thread(target=self._worker, daemon=True)

    def _load_one(self, index: int) -> Optional[Batch]:
        slot = self.pool.take(timeout=5.0)  # leak: an empty sample returns None without giving the slot back
        if slot is None:
            return None
        try:
            n = self.read(index, self.pool.view(slot, self.pool.nbytes))
        except OSError as exc:
            self._failed[index] = str(exc)
            self.pool.give(slot)
            return None
        if n == 0 and self.skip_empty:
            return None
        return Batch(self.pool, slot, n, index)

    def _worker(self) -> None:
        for index in self.indices:
            if self._stop.is_set():
                break
            batch = self._load_one(index)  # clean: near miss, either queued or released when the queue refuses
            if batch is None:
                continue
            while True:
                if self._stop.is_set():
                    batch.release()
                    break
                try:
                    self._out.put(batch, timeout=0.1)
                    break
                except queue.Full:
                    continue
        self._out.put(None)

    def start(self) -> "PrefetchLoader":
        self._thread.start()
        return self

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batch = self._out.get()
            if batch is None:
                return
            yield batch

    def stop(self) -> None:
        self._stop.set()
        while self._thread.is_alive() or not self._out.empty():
            try:
                batch = self._out.get(timeout=0.1)
            except queue.Empty:
                continue
            if batch is not None:
                batch.release()
        self._thread.join()


def peek_sizes(loader: PrefetchLoader, count: int) -> List[int]:
    sizes: List[int] = []
    for index in loader.indices[:count]:
        batch = loader._load_one(index)  # leak: only the size is kept, the batch with its slot is dropped
        if batch is None:
            continue
        sizes.append(batch.nbytes)
    return sizes


def materialize(loader: PrefetchLoader, device: torch.device) -> List[torch.Tensor]:
    tensors: List[torch.Tensor] = []
    for index in loader.indices:
        batch = loader._load_one(index)  # clean: near miss, released after the device copy
        if batch is None:
            continue
        tensors.append(batch.to_device(device))
        batch.release()
    return tensors


def load_pair(pool: PinnedPool, read: Callable[[int, torch.Tensor], int], a: int, b: int) -> Optional[Tuple[Batch, Batch]]:
    left = pool.take(timeout=1.0)  # clean: near miss, given back when the second take fails
    if left is None:
        return None
    right = pool.take(timeout=1.0)  # clean: handed on inside the returned batch
    if right is None:
        pool.give(left)
        return None
    na = read(a, pool.view(left, pool.nbytes))
    nb = read(b, pool.view(right, pool.nbytes))
    return Batch(pool, left, na, a), Batch(pool, right, nb, b)


def contrast(pool: PinnedPool, read: Callable[[int, torch.Tensor], int], pairs: Sequence[Tuple[int, int]]) -> float:
    total = 0.0
    for a, b in pairs:
        pair = load_pair(pool, read, a, b)  # leak: a length mismatch releases only the first batch
        if pair is None:
            continue
        left, right = pair
        if left.nbytes != right.nbytes:
            left.release()
            continue
        diff = left.tensor().float() - right.tensor().float()
        total += float(diff.abs().mean())
        left.release()
        right.release()
    return total


def checksum(pool: PinnedPool, read: Callable[[int, torch.Tensor], int], indices: Sequence[int]) -> int:
    acc = 0
    with pool.borrowed() as slot:  # clean: near miss, the context manager gives it back also on the early return
        for index in indices:
            n = read(index, pool.view(slot, pool.nbytes))
            if n == 0:
                return acc
            acc ^= int(pool.view(slot, n).sum())
    return acc


def background_copy(pool: PinnedPool, data: bytes) -> int:
    slot = pool.take_quiet(min_idle=2)  # clean: near miss, None means nothing to give back, else given at the end
    if slot is None:
        return 0
    n = min(len(data), pool.nbytes)
    pool.view(slot, n).copy_(torch.frombuffer(bytearray(data[:n]), dtype=torch.uint8))
    pool.give(slot)
    return n
