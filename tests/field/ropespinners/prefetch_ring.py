"""Shared-memory ring between loader threads and the training loop, with pinned copies and callbacks on consumption."""
from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import shared_memory
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import torch

log = logging.getLogger("loader.ring")
STOP = object()


class RingSlots:
    """n slots in one shared memory block."""

    def __init__(self, n: int, slot_bytes: int):
        self.slot_bytes = slot_bytes
        self.shm = shared_memory.SharedMemory(create=True, size=n * slot_bytes)  # clean: closed and unlinked by destroy()
        self._vacant: "queue.Queue[int]" = queue.Queue()
        for i in range(n):
            self._vacant.put(i)

    def next_slot(self, timeout: Optional[float] = None) -> int:
        """Raises queue.Empty on timeout."""
        return self._vacant.get(timeout=timeout)  # clean: returned to the caller

    def recycle(self, i: int) -> None:
        self._vacant.put(i)

    def window(self, i: int) -> memoryview:
        return self.shm.buf[i * self.slot_bytes:(i + 1) * self.slot_bytes]

    def destroy(self) -> None:
        self.shm.close()
        self.shm.unlink()


class PinnedShelf:
    """Pinned tensors by shape; at most `depth` of each."""

    def __init__(self, depth: int):
        self.depth = depth
        self._by_shape: Dict[Tuple[int, ...], List[torch.Tensor]] = {}
        self._count: Dict[Tuple[int, ...], int] = {}
        self._cv = threading.Condition()

    def pull(self, shape: Tuple[int, ...]) -> torch.Tensor:
        with self._cv:
            stack = self._by_shape.setdefault(shape, [])
            while not stack and self._count.get(shape, 0) >= self.depth:
                self._cv.wait()
            if stack:
                return stack.pop()  # clean: returned to the caller
            self._count[shape] = self._count.get(shape, 0) + 1
        return torch.empty(shape, dtype=torch.int32, pin_memory=True)

    def push(self, t: torch.Tensor) -> None:
        with self._cv:
            self._by_shape[tuple(t.shape)].append(t)
            self._cv.notify()


class Producer(threading.Thread):
    def __init__(self, ring: RingSlots, out: "queue.Queue[Any]", samples: Iterable[bytes]):
        super().__init__(daemon=True)
        self.ring = ring
        self.out = out
        self.samples = samples
        self.skipped = 0

    def run(self) -> None:
        for raw in self.samples:
            slot = self.ring.next_slot()  # leak: an oversize sample is skipped and its slot never recycled
            if len(raw) > self.ring.slot_bytes:
                self.skipped += 1
                continue
            self.ring.window(slot)[: len(raw)] = raw
            self.out.put((slot, len(raw)))
        self.out.put(STOP)


class Batch:
    def __init__(self, ids: torch.Tensor, on_done: Callable[[torch.Tensor], None]):
        self.ids = ids
        self._on_done = on_done

    def done(self) -> None:
        if self.ids is not None:
            self._on_done(self.ids)
            self.ids = None


class Collator:
    def __init__(self, ring: RingSlots, shelf: PinnedShelf, inbox: "queue.Queue[Any]", batch: int, length: int):
        self.ring = ring
        self.shelf = shelf
        self.inbox = inbox
        self.shape = (batch, length)

    def _fill(self, dst: torch.Tensor) -> int:
        rows = 0
        while rows < dst.shape[0]:
            item = self.inbox.get()  # clean: STOP is no slot, each slot is recycled in the loop
            if item is STOP:
                break
            slot, n = item
            row = torch.frombuffer(bytearray(self.ring.window(slot)[:n]), dtype=torch.int32)
            dst[rows, : row.numel()].copy_(row)
            self.ring.recycle(slot)
            rows += 1
        return rows

    def batches(self) -> Iterator[Batch]:
        while True:
            ids = self.shelf.pull(self.shape)  # leak: the last, short fill breaks off with ids pulled
            if self._fill(ids) < self.shape[0]:
                break
            yield Batch(ids, self.shelf.push)


def train_loop(col: Collator, step: Callable[[torch.Tensor], float], max_steps: int) -> List[float]:
    losses: List[float] = []
    for batch in col.batches():  # leak: a non-finite loss goes on to the next batch without done()
        dev = batch.ids.to("cuda", non_blocking=True)
        loss = step(dev)
        if loss != loss:
            log.warning("step %d: loss is not a number", len(losses))
            continue
        torch.cuda.current_stream().synchronize()
        batch.done()
        losses.append(loss)
        if len(losses) >= max_steps:
            break
    return losses


class AsyncPinner:
    """Pins on worker threads. The future's callback pushes a tensor that nobody wants any more."""

    def __init__(self, shelf: PinnedShelf, workers: int = 2):
        self.shelf = shelf
        self.ex = ThreadPoolExecutor(workers)
        self._live: Dict[int, Future] = {}

    def _pin(self, rows: List[List[int]]) -> torch.Tensor:
        t = self.shelf.pull((len(rows), len(rows[0])))  # clean: returned as the future's result
        t.copy_(torch.tensor(rows, dtype=torch.int32))
        return t

    def submit(self, key: int, rows: List[List[int]]) -> None:
        self.forget(key)
        self._live[key] = self.ex.submit(self._pin, rows)

    def collect(self, key: int) -> Optional[torch.Tensor]:
        fut = self._live.pop(key, None)
        return None if fut is None else fut.result()

    def forget(self, key: int) -> None:
        fut = self._live.pop(key, None)
        if fut is not None:
            fut.add_done_callback(lambda f: self.shelf.push(f.result()))


def evaluate(pinner: AsyncPinner, data: List[List[List[int]]], score: Callable[[torch.Tensor], float]) -> float:
    for i, rows in enumerate(data):
        pinner.submit(i, rows)
    total = 0.0
    for i in range(len(data)):
        total += score(pinner.collect(i).to("cuda"))  # leak: the pinned tensor is copied to the device and dropped
    return total / max(1, len(data))


def inject(ring: RingSlots, out: "queue.Queue[Any]", raw: bytes) -> bool:
    try:
        slot = ring.next_slot(timeout=0.5)  # leak: a full queue drops the slot
    except queue.Empty:
        return False
    ring.window(slot)[: len(raw)] = raw
    try:
        out.put_nowait((slot, len(raw)))
    except queue.Full:
        return False
    return True


def pad_copy(shelf: PinnedShelf, src: torch.Tensor, shape: Tuple[int, int], into: Optional[torch.Tensor]) -> torch.Tensor:
    own = into is None
    dst = shelf.pull(shape) if own else into  # clean: near miss, pushed under own, otherwise it is the caller's
    dst.zero_()
    dst[: src.shape[0], : src.shape[1]].copy_(src)
    dev = dst.to("cuda")
    if own:
        shelf.push(dst)
    return dev
