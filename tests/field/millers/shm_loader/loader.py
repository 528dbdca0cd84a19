from __future__ import annotations

import queue
import threading
from typing import Dict, Iterator, List, Optional, Type

from .collate import Decode, Sample
from .slots import Slot, SlotRing
from .worker import MapWorker, Worker


class SlotLoader:
    def __init__(self, ring: SlotRing, decode: Decode, workers: int = 2, kind: Type[Worker] = MapWorker, prefetch: int = 4) -> None:
        self.ring = ring
        self.index_q: "queue.Queue[Optional[List[Sample]]]" = queue.Queue()
        self.out_q: "queue.Queue[Slot]" = queue.Queue()
        self._credits = threading.Semaphore(prefetch)
        self._workers = [kind(ring, self.index_q, self.out_q, decode, self._credits.release) for _ in range(workers)]
        self._held: Dict[int, Slot] = {}
        for w in self._workers:
            w.start()

    def feed(self, batch: List[Sample]) -> bool:
        self._credits.acquire()  # leak: an empty batch is refused and the credit stays taken
        if not batch:
            return False
        self.index_q.put(batch)
        return True

    def try_feed(self, batch: List[Sample]) -> bool:
        if not batch or not self._credits.acquire(blocking=False):  # clean: the worker's on_taken callback releases the credit
            return False
        self.index_q.put(batch)
        return True

    def next_batch(self) -> bytes:
        slot = self.out_q.get()
        try:
            return bytes(slot.mem[: slot.length])
        finally:
            self.ring.recycle(slot)

    def next_view(self, step: int) -> memoryview:
        """Zero-copy variant; call ``done(step)`` when the device copy has finished."""
        slot = self.out_q.get()
        self._held[step] = slot
        return memoryview(slot.mem)[: slot.length]

    def done(self, step: int) -> None:
        slot = self._held.pop(step, None)
        if slot is not None:
            self.ring.recycle(slot)

    def batches(self, n: int) -> Iterator[bytes]:
        for _ in range(n):
            yield self.next_batch()

    def preallocate(self, n: int) -> List[Slot]:
        run = self.ring.claim_run(n, 0.1)  # clean: near miss, a short run is recycled, a full one returned
        if len(run) < n:
            for slot in run:
                self.ring.recycle(slot)
            return []
        return run

    def benchmark(self, n: int) -> float:
        pair = self.ring.claim_pair(0.5)  # leak: only the first slot of the pair is recycled
        if pair is None:
            return 0.0
        src, dst = pair
        for _ in range(n):
            dst.mem[:] = src.mem
        self.ring.recycle(src)
        return n * len(src.mem) / 1e9

    def shutdown(self) -> None:
        for w in self._workers:
            w.stop_requested.set()
            self.index_q.put(None)
        for w in self._workers:
            w.join()
        while True:
            try:
                slot = self.out_q.get_nowait()
            except queue.Empty:
                break
            self.ring.recycle(slot)
        for step in list(self._held):
            self.done(step)
