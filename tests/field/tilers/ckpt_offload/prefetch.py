"""Brings offloaded activations back ahead of the backward pass."""
from __future__ import annotations

from collections import deque
from typing import Callable, Deque, List, Optional, Tuple

from .pinned import PinnedBuffer, PinnedPool

Loader = Callable[[int], bytes]


class Prefetcher:
    def __init__(self, pool: PinnedPool, load: Loader, depth: int = 2) -> None:
        self.pool = pool
        self.load = load
        self.depth = depth
        self._queue: Deque[Tuple[int, PinnedBuffer]] = deque()

    def push(self, layer: int) -> bool:
        if len(self._queue) >= self.depth:
            return False
        data = self.load(layer)
        buf = self.pool.checkout(len(data))  # leak: take() pops the entries of other layers and drops them
        buf.write(data)
        self._queue.append((layer, buf))
        return True

    def take(self, layer: int) -> Optional[bytes]:
        while self._queue:
            have, buf = self._queue.popleft()
            if have == layer:
                data = buf.read()
                self.pool.checkin(buf)
                return data
        return None


class OrderedPrefetcher:
    def __init__(self, pool: PinnedPool, load: Loader, depth: int = 2) -> None:
        self.pool = pool
        self.load = load
        self.depth = depth
        self._queue: Deque[Tuple[int, PinnedBuffer]] = deque()

    def push(self, layer: int) -> bool:
        data = self.load(layer)
        buf = self.pool.checkout(len(data))  # clean: near miss, checked in when the queue is full, otherwise queued
        if len(self._queue) >= self.depth:
            self.pool.checkin(buf)
            return False
        buf.write(data)
        self._queue.append((layer, buf))
        return True

    def take(self, layer: int) -> Optional[bytes]:
        found: Optional[bytes] = None
        while self._queue and found is None:
            have, buf = self._queue.popleft()
            if have == layer:
                found = buf.read()
            self.pool.checkin(buf)
        return found

    def flush(self) -> None:
        while self._queue:
            self.pool.checkin(self._queue.popleft()[1])


class DoubleBuffer:
    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self._slots: List[Optional[PinnedBuffer]] = [None, None]

    def load(self, step: int, data: bytes) -> PinnedBuffer:
        i = step % 2
        previous = self._slots[i]
        self._slots[i] = self.pool.checkout(len(data))  # clean: near miss, the one it replaces is checked in next
        if previous is not None:
            self.pool.checkin(previous)
        self._slots[i].write(data)
        return self._slots[i]

    def close(self) -> None:
        for i, buf in enumerate(self._slots):
            if buf is not None:
                self.pool.checkin(buf)
                self._slots[i] = None
