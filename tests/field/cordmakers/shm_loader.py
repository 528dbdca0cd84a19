"""Multi-process data loading through shared memory slots.

Workers decode samples into slots of one shared segment and send the slot
numbers over a queue.  The trainer wraps a slot in a Batch and recycles it
after the copy to the device.
"""
from __future__ import annotations

import collections
import logging
import multiprocessing as mp
from multiprocessing import shared_memory
from typing import Any, Callable, Iterable, Iterator, Optional

import numpy as np
import torch

logger = logging.getLogger(__name__)


class SlotRing:
    """Slots of one shared segment, numbered; a semaphore counts the free ones."""

    def __init__(self, slots: int, slot_bytes: int):
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.seg = shared_memory.SharedMemory(create=True, size=slots * slot_bytes)  # clean: closed and unlinked in destroy()
        self.free = mp.SimpleQueue()
        self.avail = mp.Semaphore(slots)
        for i in range(slots):
            self.free.put(i)

    def next_slot(self, timeout: Optional[float] = None) -> Optional[int]:
        if not self.avail.acquire(timeout=timeout):  # clean: near miss, the permit travels with the slot and recycle() releases it
            return None
        return self.free.get()  # clean: returned to the caller

    def peek_slot(self, nbytes: int) -> Optional[int]:
        """A slot for nbytes at once, or None."""
        if not self.avail.acquire(block=False):  # leak: the permit is kept when the sample is too large
            return None
        if nbytes > self.slot_bytes:
            logger.warning("sample of %d bytes does not fit", nbytes)
            return None
        return self.free.get()  # clean: returned to the caller

    def recycle(self, slot: int) -> None:
        self.free.put(slot)
        self.avail.release()

    def view(self, slot: int, nbytes: int) -> memoryview:
        base = slot * self.slot_bytes
        return self.seg.buf[base:base + nbytes]

    def destroy(self) -> None:
        self.seg.close()
        self.seg.unlink()


class Batch:
    """A batch living in a slot.  Owns the slot unless built with owned=False."""

    def __init__(self, ring: SlotRing, slot: int, nbytes: int, owned: bool = True):
        self.ring = ring
        self.slot = slot
        self.nbytes = nbytes
        self.owned = owned

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self.ring.view(self.slot, self.nbytes), dtype=torch.uint8)

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, et, ev, tb) -> None:
        if self.owned:
            self.owned = False
            self.ring.recycle(self.slot)


Decode = Callable[[Any], Optional[np.ndarray]]


def worker_main(ring: SlotRing, decode: Decode, tasks, results) -> None:
    while True:
        item = tasks.get()
        if item is None:
            break
        slot = ring.next_slot()  # leak: an undecodable sample skips recycle()
        array = decode(item)
        if array is None:
            results.put((item, None, 0))
            continue
        raw = array.tobytes()
        ring.view(slot, len(raw))[:] = raw
        results.put((item, slot, len(raw)))


def worker_batched(ring: SlotRing, decode: Decode, groups: Iterable[list[Any]], results) -> int:
    sent = 0
    for group in groups:
        arrays = [a for a in map(decode, group) if a is not None]
        if not arrays:
            continue
        slot = ring.next_slot()  # clean: near miss, the continue comes before, then sent over the queue or recycled
        raw = np.concatenate([a.reshape(-1) for a in arrays]).tobytes()
        if len(raw) > ring.slot_bytes:
            ring.recycle(slot)
            continue
        ring.view(slot, len(raw))[:] = raw
        results.put((group, slot, len(raw)))
        sent += 1
    return sent


class SharedLoader:
    def __init__(self, ring: SlotRing, decode: Decode, items: list[Any], workers: int, device: torch.device):
        self.ring = ring
        self.items = items
        self.device = device
        self.tasks: mp.Queue = mp.Queue()
        self.results: mp.Queue = mp.Queue()
        self.held: collections.deque[int] = collections.deque()
        self.reorder: dict[Any, tuple[int, int]] = {}
        self.procs = [
            mp.Process(target=worker_main, args=(ring, decode, self.tasks, self.results), daemon=True)
            for _ in range(workers)
        ]
        for p in self.procs:
            p.start()

    def _send_all(self) -> None:
        for item in self.items:
            self.tasks.put(item)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._send_all()
        for _ in self.items:
            _, slot, nbytes = self.results.get()
            if slot is None:
                continue
            with Batch(self.ring, slot, nbytes) as batch:
                out = batch.tensor().to(self.device)
            yield out

    def in_order(self) -> Iterator[torch.Tensor]:
        self._send_all()
        for want in self.items:
            while want not in self.reorder:
                item, slot, nbytes = self.results.get()
                self.reorder[item] = (slot, nbytes)
            slot, nbytes = self.reorder.pop(want)
            if slot is None:
                continue
            out = Batch(self.ring, slot, nbytes, owned=False).tensor().to(self.device)
            self.ring.recycle(slot)
            yield out

    def warm(self, arrays: list[np.ndarray]) -> int:
        """Pre-fill some slots with synthetic data so the first step can start."""
        done = 0
        for array in arrays:
            slot = self.ring.next_slot(timeout=0.1)  # clean: near miss, moved into self.held, which release_held() empties
            if slot is None:
                break
            self.held.append(slot)
            raw = array.tobytes()
            self.ring.view(slot, len(raw))[:] = raw
            done += 1
        return done

    def release_held(self) -> None:
        while self.held:
            self.ring.recycle(self.held.popleft())

    def shutdown(self) -> None:
        for _ in self.procs:
            self.tasks.put(None)
        for p in self.procs:
            p.join()
        self.release_held()
        for slot, _ in self.reorder.values():
            if slot is not None:
                self.ring.recycle(slot)
        self.reorder.clear()
        self.ring.destroy()


def sample_once(ring: SlotRing, array: np.ndarray, device: torch.device) -> Optional[torch.Tensor]:
    slot = ring.next_slot(timeout=1.0)  # leak: Batch is built with owned=False and nobody recycles
    if slot is None:
        return None
    raw = array.tobytes()
    ring.view(slot, len(raw))[:] = raw
    with Batch(ring, slot, len(raw), owned=False) as batch:
        return batch.tensor().to(device)


def echo(ring: SlotRing, source: Iterator[np.ndarray], times: int) -> Iterator[Batch]:
    """Data echoing: the same slot serves several steps."""
    for array in source:
        slot = ring.next_slot()  # clean: near miss, the unowned batches share it and finally recycles it once
        raw = array.tobytes()
        try:
            ring.view(slot, len(raw))[:] = raw
            for _ in range(times):
                yield Batch(ring, slot, len(raw), owned=False)
        finally:
            ring.recycle(slot)


def mixup(ring: SlotRing, a: np.ndarray, b: np.ndarray, lam: float) -> Optional[Batch]:
    left = ring.next_slot(timeout=1.0)  # leak: not recycled when no second slot comes in time
    if left is None:
        return None
    right = ring.next_slot(timeout=1.0)  # clean: recycled after the mix, None-checked
    if right is None:
        logger.info("mixup: only one slot")
        return None
    n = min(a.nbytes, b.nbytes)
    ring.view(left, n)[:] = a.tobytes()[:n]
    ring.view(right, n)[:] = b.tobytes()[:n]
    x = np.frombuffer(ring.view(left, n), dtype=np.uint8)
    y = np.frombuffer(ring.view(right, n), dtype=np.uint8)
    ring.view(left, n)[:] = (lam * x + (1 - lam) * y).astype(np.uint8).tobytes()
    ring.recycle(right)
    return Batch(ring, left, n)


def preview(ring: SlotRing, a: np.ndarray, b: np.ndarray, device: torch.device) -> Optional[torch.Tensor]:
    batch = mixup(ring, a, b, 0.5)  # clean: recycled by the exit of the with statement
    if batch is None:
        return None
    with batch:
        return batch.tensor().to(device)


def mean_of(ring: SlotRing, a: np.ndarray, b: np.ndarray) -> float:
    batch = mixup(ring, a, b, 0.5)  # leak: the batch is read and dropped, its slot stays out
    if batch is None:
        return 0.0
    return float(batch.tensor().float().mean())
