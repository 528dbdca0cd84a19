"""Training input: batches are laid into shared-memory slots and fed to the step loop."""
from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Iterator, Sequence


class SlotRing:
    """Fixed number of shared-memory slots."""

    def __init__(self, depth: int, rows: int) -> None:
        self.rows = rows
        self._ready = deque(range(depth))
        self.memory = [[0] * rows for _ in range(depth)]

    def get_slot(self) -> int:
        while not self._ready:
            self._poll()
        return self._ready.popleft()

    def try_slot(self) -> int | None:
        return self._ready.popleft() if self._ready else None

    def recycle(self, slot: int) -> None:
        self._ready.append(slot)

    def _poll(self) -> None:
        raise TimeoutError("feed ring is stuck")


@dataclass
class Sample:
    ids: list[int]
    valid: bool = True


@dataclass
class Batch:
    slots: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Feed:
    def __init__(self, ring: SlotRing, source: Sequence[Sample], batch_size: int, drop_last: bool) -> None:
        self.ring = ring
        self.source = source
        self.batch_size = batch_size
        self.drop_last = drop_last

    def _fill(self, slot: int, start: int) -> int:
        rows = self.source[start:start + self.batch_size]
        for i, sample in enumerate(rows):
            self.ring.memory[slot][i] = len(sample.ids)
        return len(rows)

    def epoch(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self.source), self.batch_size):
            slot = self.ring.get_slot()  # leak: a short last batch under drop_last ends the epoch with its slot
            rows = self._fill(slot, start)
            if rows < self.batch_size and self.drop_last:
                break
            yield slot, rows
            self.ring.recycle(slot)

    def eval_epoch(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self.source), self.batch_size):
            slot = self.ring.get_slot()  # clean: near miss, finally recycles on both ways
            try:
                rows = self._fill(slot, start)
                if rows < self.batch_size and self.drop_last:
                    break
                yield slot, rows
            finally:
                self.ring.recycle(slot)


class PrefetchGroup:
    """Holds a number of slots for the workers of one epoch."""

    def __init__(self, ring: SlotRing, workers: int) -> None:
        self.ring = ring
        self.workers = workers
        self.slots: list[int] = []
        self._running = False
        self.step = 0

    def __enter__(self) -> "PrefetchGroup":
        self.slots = [self.ring.get_slot() for _ in range(self.workers)]  # leak: _running is never set, exit skips
        self.step = 0
        return self

    def advance(self) -> int:
        self.step += 1
        return self.slots[self.step % self.workers]

    def __exit__(self, *exc_info) -> None:
        if self._running:
            for slot in self.slots:
                self.ring.recycle(slot)
            self._running = False


class EvalGroup:
    def __init__(self, ring: SlotRing, workers: int) -> None:
        self.ring = ring
        self.workers = workers
        self.slots: list[int] = []
        self._running = False

    def __enter__(self) -> "EvalGroup":
        self.slots = [self.ring.get_slot() for _ in range(self.workers)]  # clean: near miss, the flag is set here
        self._running = True
        return self

    def __exit__(self, *exc_info) -> None:
        if self._running:
            for slot in self.slots:
                self.ring.recycle(slot)
            self._running = False


def evaluate(ring: SlotRing, steps: int, score: Callable[[int], float]) -> float:
    total = 0.0
    with EvalGroup(ring, 4) as group:  # clean: exit recycles the slots
        for step in range(steps):
            total += score(group.slots[step % group.workers])
    return total / max(steps, 1)


class StepLoop:
    def __init__(self, ring: SlotRing) -> None:
        self.ring = ring
        self.pending: deque[Batch] = deque()
        self.packed: deque[Batch] = deque()
        self.loss = 0.0

    def stage(self, samples: list[Sample]) -> None:
        batch = Batch(samples=samples)
        for sample in samples:
            slot = self.ring.get_slot()  # leak: consume pairs the slots with the valid samples only
            self.ring.memory[slot][0] = len(sample.ids)
            batch.slots.append(slot)
        self.pending.append(batch)

    def consume(self) -> None:
        batch = self.pending.popleft()
        valid = [s for s in batch.samples if s.valid]
        for slot, sample in zip(batch.slots, valid):
            self.loss += self.ring.memory[slot][0] / len(sample.ids)
            self.ring.recycle(slot)

    def stage_packed(self, samples: list[Sample]) -> None:
        batch = Batch()
        for sample in samples:
            if not sample.valid:
                continue
            slot = self.ring.get_slot()  # clean: near miss, slots and samples grow together
            self.ring.memory[slot][0] = len(sample.ids)
            batch.slots.append(slot)
            batch.samples.append(sample)
        self.packed.append(batch)

    def consume_packed(self) -> None:
        batch = self.packed.popleft()
        for slot, sample in zip(batch.slots, batch.samples):
            self.loss += self.ring.memory[slot][0] / len(sample.ids)
            self.ring.recycle(slot)


def masked_step(ring: SlotRing, tokens: Sequence[int], masked: bool, rng: random.Random) -> int:
    ids = ring.get_slot()  # clean: recycled at the end
    mask = ring.get_slot() if masked else None  # leak: recycled only where some token came out masked
    hits = 0
    for i, tok in enumerate(tokens[: ring.rows]):
        ring.memory[ids][i] = tok
        if mask is not None:
            ring.memory[mask][i] = int(rng.random() < 0.15)
            hits += ring.memory[mask][i]
    if hits:
        ring.recycle(mask)
    ring.recycle(ids)
    return hits


def labelled_step(ring: SlotRing, tokens: Sequence[int], labels: Sequence[int] | None) -> int:
    ids = ring.get_slot()  # clean: recycled at the end
    target = ring.get_slot() if labels is not None else None  # clean: near miss, same test at the end
    for i, tok in enumerate(tokens[: ring.rows]):
        ring.memory[ids][i] = tok
        if labels is not None:
            ring.memory[target][i] = labels[i]
    used = len(tokens)
    if labels is not None:
        used += len(labels)
        ring.recycle(target)
    ring.recycle(ids)
    return used


def probe_depth(ring: SlotRing, want: int) -> int:
    got: list[int] = []
    while (slot := ring.try_slot()) is not None:  # clean: near miss, the loop below recycles all of them
        got.append(slot)
        if len(got) == want:
            break
    depth = len(got)
    while got:
        ring.recycle(got.pop())
    return depth
