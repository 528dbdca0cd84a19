from __future__ import annotations

import math
from collections import deque
from typing import Callable, Deque

from .sampler import PrioritySampler
from .segments import Segment

LossFn = Callable[[list[Segment]], float]


class Learner:
    def __init__(self, sampler: PrioritySampler, loss: LossFn, batch: int, prefetch: int = 2) -> None:
        self.sampler = sampler
        self.loss = loss
        self.batch = batch
        self.prefetch = prefetch
        self.queue: Deque[list[Segment]] = deque()
        self.skipped = 0

    def fill(self) -> None:
        while len(self.queue) < self.prefetch:
            batch = self.sampler.sample(self.batch)  # clean: near miss, a short batch is released before the break, others by update() or flush()
            if len(batch) < self.batch:
                self.sampler.release(batch)
                break
            self.queue.append(batch)

    def update(self) -> float | None:
        if not self.queue:
            return None
        batch = self.queue.popleft()
        value = self.loss(batch)
        for seg in batch:
            seg.priority = max(value, 1e-3)
        self.sampler.release(batch)
        return value

    def update_direct(self) -> float | None:
        batch = self.sampler.sample(self.batch)  # leak: a loss that is not finite returns before the release
        if not batch:
            return None
        value = self.loss(batch)
        if not math.isfinite(value):
            self.skipped += 1
            return None
        self.sampler.release(batch)
        return value

    def evaluate(self, rounds: int) -> float:
        total = 0.0
        for _ in range(rounds):
            batch = self.sampler.sample_unique(self.batch)  # clean: near miss, released in every round
            if batch:
                total += self.loss(batch)
            self.sampler.release(batch)
        return total / max(rounds, 1)

    def flush(self) -> None:
        while self.queue:
            self.sampler.release(self.queue.popleft())
