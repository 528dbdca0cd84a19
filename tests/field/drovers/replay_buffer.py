"""Replay buffer for off-policy fine-tuning.

Episodes live in reference-counted chunks: the buffer holds one reference, so does every sample, priority
sweep or snapshot under way. A chunk's storage is recycled when its count falls to zero.
"""
from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict, deque
from typing import Deque, Iterator, List, NamedTuple, Optional, Tuple

log = logging.getLogger(__name__)


class Chunk:
    def __init__(self, key: int, steps: List[float]):
        self.key = key
        self.steps = steps
        self.refs = 1
        self.stale = False
        self._mu = threading.Lock()

    def incref(self) -> "Chunk":
        with self._mu:
            self.refs += 1
        return self

    def decref(self) -> int:
        with self._mu:
            self.refs -= 1
            if self.refs == 0:
                self.steps = []
            return self.refs


class Draw(NamedTuple):
    chunk: Chunk
    start: int
    length: int


class ReplayBuffer:
    def __init__(self, capacity: int, seed: int = 0):
        self.capacity = capacity
        self._chunks: "OrderedDict[int, Chunk]" = OrderedDict()
        self._rng = random.Random(seed)
        self._mu = threading.RLock()
        self._next = 0

    def append(self, steps: List[float]) -> int:
        with self._mu:
            key = self._next
            self._next += 1
            self._chunks[key] = Chunk(key, steps)
            while len(self._chunks) > self.capacity:
                _, old = self._chunks.popitem(last=False)
                old.decref()
            return key

    def ref(self, key: int) -> Optional[Chunk]:
        """A counted reference, or None for a key that has been evicted."""
        with self._mu:
            chunk = self._chunks.get(key)
            if chunk is None:
                return None
            return chunk.incref()  # clean: handed to the caller

    def ref_random(self) -> Optional[Chunk]:
        with self._mu:
            if not self._chunks:
                return None
            key = self._rng.choice(list(self._chunks))
        return self.ref(key)  # clean: handed to the caller

    def ref_all(self) -> List[Chunk]:
        with self._mu:
            return [c.incref() for c in self._chunks.values()]  # clean: near miss, the list is the caller's

    def mean_return(self, key: int) -> float:
        chunk = self.ref(key)  # leak: an empty chunk returns early with its count still raised
        if chunk is None:
            return 0.0
        if not chunk.steps:
            return 0.0
        value = sum(chunk.steps) / len(chunk.steps)
        chunk.decref()
        return value


class Sampler:
    """Draws windows; a draw holds its chunk until ``done``."""

    def __init__(self, buffer: ReplayBuffer, window: int):
        self.buffer = buffer
        self.window = window
        self._rng = random.Random(1)

    def draw(self) -> Optional[Draw]:
        chunk = self.buffer.ref_random()  # clean: near miss, returned in the draw or lowered when it is too short
        if chunk is None:
            return None
        if len(chunk.steps) < self.window:
            chunk.decref()
            return None
        start = self._rng.randrange(len(chunk.steps) - self.window + 1)
        return Draw(chunk, start, self.window)

    def draw_fresh(self, tries: int = 8) -> Optional[Draw]:
        for _ in range(tries):
            chunk = self.buffer.ref_random()  # leak: a stale chunk is passed over with its count raised
            if chunk is None:
                return None
            if chunk.stale:
                continue
            return Draw(chunk, 0, min(self.window, len(chunk.steps)))
        return None

    def done(self, draw: Draw) -> None:
        draw.chunk.decref()

    def minibatch(self, n: int) -> List[List[float]]:
        rows = []
        for _ in range(n):
            d = self.draw()  # clean: done after the copy
            if d is None:
                continue
            rows.append(d.chunk.steps[d.start:d.start + d.length])
            self.done(d)
        return rows

    def estimate(self, n: int) -> float:
        total = 0.0
        for _ in range(n):
            d = self.draw()  # leak: the draw is read and never done
            if d is not None:
                total += sum(d.chunk.steps[d.start:d.start + d.length])
        return total / max(n, 1)


class Prefetcher:
    """Keeps a few draws ahead of the learner."""

    def __init__(self, sampler: Sampler, depth: int):
        self.sampler = sampler
        self._ahead: Deque[Draw] = deque()
        self.depth = depth

    def fill(self) -> None:
        while len(self._ahead) < self.depth:
            d = self.sampler.draw()  # clean: queued; next gives it out and clear ends it
            if d is None:
                return
            self._ahead.append(d)

    def next(self) -> Optional[Draw]:
        if not self._ahead:
            self.fill()
        return self._ahead.popleft() if self._ahead else None

    def clear(self) -> None:
        while self._ahead:
            self.sampler.done(self._ahead.popleft())


class HindsightPrefetcher:
    """As above, with a bounded window from which the oldest draw falls out."""

    def __init__(self, sampler: Sampler, depth: int):
        self.sampler = sampler
        self._window: Deque[Draw] = deque(maxlen=depth)

    def advance(self) -> bool:
        d = self.sampler.draw_fresh()  # leak: the bounded deque pushes out the oldest draw without done
        if d is None:
            return False
        self._window.append(d)
        return True

    def close(self) -> None:
        while self._window:
            self.sampler.done(self._window.pop())


def longest(buffer: ReplayBuffer) -> Optional[Chunk]:
    """The caller owns a reference to the chunk it gets."""
    best: Optional[Chunk] = None
    for c in buffer.ref_all():  # leak: only the chunk that is beaten later is lowered, one that never leads keeps its count
        if best is None:
            best = c
        elif len(c.steps) > len(best.steps):
            best.decref()
            best = c
    return best


def merge(buffer: ReplayBuffer, left: int, right: int) -> Optional[int]:
    a = buffer.ref(left)  # leak: kept when the right chunk has been evicted
    if a is None:
        return None
    b = buffer.ref(right)  # clean: lowered after the append
    if b is None:
        return None
    key = buffer.append(a.steps + b.steps)
    a.decref()
    b.decref()
    return key


def priority_sweep(buffer: ReplayBuffer, keys: List[int]) -> Iterator[Tuple[int, float]]:
    for k in keys:
        chunk = buffer.ref(k)  # clean: near miss, lowered before the yield
        if chunk is None:
            continue
        score = max(chunk.steps, default=0.0)
        chunk.decref()
        yield k, score
