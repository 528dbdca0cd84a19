"""Trainer side: ordered batches out of the slots that the workers send."""
from __future__ import annotations

import queue
import random
from typing import Callable, Dict, Iterator, List, Optional, Sequence

import numpy as np

from .slots import Slot, SlotTable
from .worker import FillWorker, Message


class BatchLoader:
    def __init__(self, table: SlotTable, read: Callable[[int], np.ndarray], workers: int, batch: int):
        self.table = table
        self.batch = batch
        self._inbox: "queue.Queue[Optional[tuple]]" = queue.Queue()
        self._outbox: "queue.Queue[Message]" = queue.Queue()
        self._early: Dict[int, Slot] = {}
        self._workers = [FillWorker(table, self._inbox, self._outbox, read) for _ in range(workers)]
        for worker in self._workers:
            worker.start()

    def _schedule(self, keys: Sequence[int]) -> int:
        count = 0
        for start in range(0, len(keys), self.batch):
            self._inbox.put((count, list(keys[start : start + self.batch])))
            count += 1
        return count

    def _slot_of(self, index: int) -> Slot:
        """The filled slot of a batch; it now belongs to the caller."""
        while index not in self._early:
            message = self._outbox.get()
            self._early[message.index] = message.slot
        return self._early.pop(index)

    def epoch(self, keys: Sequence[int]) -> Iterator[np.ndarray]:
        """Views that are valid until the next one is asked for."""
        for index in range(self._schedule(keys)):
            slot = self._slot_of(index)  # clean: reclaimed in finally, also if the iteration is given up
            try:
                yield slot.array[: slot.filled]
            finally:
                self.table.reclaim(slot)

    def full_batches(self, keys: Sequence[int], row_bytes: int) -> Iterator[np.ndarray]:
        for index in range(self._schedule(keys)):
            slot = self._slot_of(index)  # leak: the short last batch returns before the reclaim
            if slot.filled < row_bytes * self.batch:
                return
            yield slot.array[: slot.filled].reshape(self.batch, row_bytes)
            self.table.reclaim(slot)

    def shuffled(self, keys: Sequence[int], window: int, seed: int) -> Iterator[np.ndarray]:
        rng = random.Random(seed)
        held: List[Slot] = []
        for index in range(self._schedule(keys)):
            held.append(self._slot_of(index))  # clean: near miss, reclaimed below, the rest in the end
            if len(held) < window:
                continue
            pick = rng.randrange(len(held))
            held[pick], held[-1] = held[-1], held[pick]
            slot = held.pop()
            data = slot.array[: slot.filled].copy()
            self.table.reclaim(slot)
            yield data
        while held:
            slot = held.pop(rng.randrange(len(held)))
            data = slot.array[: slot.filled].copy()
            self.table.reclaim(slot)
            yield data

    def windowed_mean(self, keys: Sequence[int], window: int) -> List[float]:
        means: List[float] = []
        recent: List[Slot] = []
        for index in range(self._schedule(keys)):
            recent.append(self._slot_of(index))  # leak: slots that slide out of the window are just deleted
            if len(recent) > window:
                del recent[0]
            means.append(float(np.mean([s.array[: s.filled].mean() for s in recent])))
        self.table.reclaim_all(recent)
        return means

    def first_shape(self, keys: Sequence[int]) -> int:
        self._schedule(keys[: self.batch])
        filled = self._slot_of(0).filled  # leak: only the length of the temporary is used
        return filled

    def close(self) -> None:
        for _ in self._workers:
            self._inbox.put(None)
        for worker in self._workers:
            worker.join()
        while not self._outbox.empty():
            self.table.reclaim(self._outbox.get().slot)
        for slot in self._early.values():
            self.table.reclaim(slot)
        self._early.clear()
