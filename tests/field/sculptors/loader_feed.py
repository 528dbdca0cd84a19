"""Training input: a reader thread fills fixed batch slots, the step loop empties them."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Slot:
    index: int
    array: np.ndarray
    rows: int = 0
    epoch: int = 0
    meta: dict = field(default_factory=dict)


class Feed:
    """The reader blocks once all slots are out. recycle() lets it fill the slot anew."""

    def __init__(self, source, slots: int, shape: tuple[int, ...]) -> None:
        self._source = source
        self._slots = [Slot(i, np.zeros(shape, dtype=np.float32)) for i in range(slots)]
        self._blank: queue.Queue[int] = queue.Queue()
        self._filled: queue.Queue[Slot | None] = queue.Queue()
        for slot in self._slots:
            self._blank.put(slot.index)
        self._thread = threading.Thread(target=self._read, name="feed", daemon=True)

    def start(self) -> "Feed":
        self._thread.start()
        return self

    def _read(self) -> None:
        for epoch, rows in self._source:
            slot = self._slots[self._blank.get()]
            slot.rows = len(rows)
            slot.epoch = epoch
            slot.array[:slot.rows] = rows
            self._filled.put(slot)
        self._filled.put(None)

    def upcoming(self, timeout: float | None = None) -> Slot | None:
        """The next filled slot, None at the end of the data."""
        return self._filled.get(timeout=timeout)

    def recycle(self, index: int) -> None:
        self._slots[index].rows = 0
        self._blank.put(index)


class StepLoop:
    def __init__(self, feed: Feed, model, min_rows: int = 8) -> None:
        self.feed = feed
        self.model = model
        self.min_rows = min_rows
        self.losses: list[float] = []
        self.parked: list[Slot] = []

    def train_epoch(self) -> float:
        total = 0.0
        steps = 0
        while (slot := self.feed.upcoming()) is not None:  # leak: short batches skip the recycle
            if slot.rows < self.min_rows:
                continue
            total += self.model.step(slot.array[:slot.rows])
            steps += 1
            self.feed.recycle(slot.index)
        return total / max(1, steps)

    def validate(self, limit: int) -> float:
        worst = 0.0
        for _ in range(limit):
            slot = self.feed.upcoming()  # clean: near miss, short batches are recycled before the continue
            if slot is None:
                break
            if slot.rows < self.min_rows:
                self.feed.recycle(slot.index)
                continue
            worst = max(worst, self.model.loss(slot.array[:slot.rows]))
            self.feed.recycle(slot.index)
        return worst

    def skip_to_epoch(self, epoch: int) -> bool:
        """Discards what is left of the earlier epochs and steps once on the first batch of this one."""
        while True:
            slot = self.feed.upcoming()  # clean: near miss, recycled whichever way the epoch compares
            if slot is None:
                return False
            reached = slot.epoch >= epoch
            if reached:
                self.losses.append(self.model.step(slot.array[:slot.rows]))
            self.feed.recycle(slot.index)
            if reached:
                return True

    def peek_shape(self) -> tuple[int, ...]:
        first = self.feed.upcoming(timeout=30)  # leak: looked at for its shape and dropped
        if first is None:
            return ()
        shape = first.array[:first.rows].shape
        self.model.build(shape)
        return shape

    def park(self, count: int) -> int:
        """Holds batches back for the replay at the end of the epoch."""
        for _ in range(count):
            slot = self.feed.upcoming()  # clean: near miss, parked, replay recycles each of them
            if slot is None:
                break
            self.parked.append(slot)
        return len(self.parked)

    def replay(self) -> None:
        for slot in self.parked:
            self.losses.append(self.model.step(slot.array[:slot.rows]))
            self.feed.recycle(slot.index)
        self.parked.clear()

    def paired(self) -> float | None:
        left = self.feed.upcoming()  # leak: not recycled when the data end before the second one
        if left is None:
            return None
        right = self.feed.upcoming()  # clean: recycled after the step
        if right is None:
            return None
        loss = self.model.contrast(left.array, right.array)
        for slot in (left, right):
            self.feed.recycle(slot.index)
        return loss
