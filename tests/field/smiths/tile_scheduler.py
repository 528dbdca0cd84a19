"""Persistent tile scheduler: SM permits, per-queue locks and semaphore-guarded launches."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, List, Optional


@dataclass(frozen=True)
class Tile:
    m: int
    n: int
    cost: int = 1


class SMBudget:
    """Counted permits for streaming multiprocessors."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._lock = threading.Lock()

    def reserve(self, n: int) -> bool:
        with self._lock:
            if self.used + n > self.total:
                return False
            self.used += n
            return True

    def unreserve(self, n: int) -> None:
        with self._lock:
            self.used -= n


class TileQueue:
    def __init__(self, tiles: List[Tile]) -> None:
        self.lock = threading.Lock()
        self.tiles: Deque[Tile] = deque(tiles)
        self.closed = False

    def pop(self) -> Optional[Tile]:
        self.lock.acquire()  # leak: a closed queue returns with the lock held
        if self.closed:
            return None
        tile = self.tiles.popleft() if self.tiles else None
        self.lock.release()
        return tile

    def push(self, tile: Tile) -> None:
        self.lock.acquire()  # clean: finally
        try:
            if self.closed:
                raise ValueError("queue closed")
            self.tiles.append(tile)
        finally:
            self.lock.release()

    def steal(self, other: "TileQueue") -> Optional[Tile]:
        if not other.lock.acquire(blocking=False):  # clean: near miss, the early return is the failed take
            return None
        try:
            return other.tiles.pop() if other.tiles else None
        finally:
            other.lock.release()

    def steal_half(self, other: "TileQueue") -> int:
        if not self.lock.acquire(timeout=0.1):  # leak: the victim's lock is busy, returns with its own held
            return 0
        if not other.lock.acquire(timeout=0.1):  # clean: released below, the early return is the failed take
            return 0
        moved = len(other.tiles) // 2
        for _ in range(moved):
            self.tiles.append(other.tiles.pop())
        other.lock.release()
        self.lock.release()
        return moved

    def size_hint(self) -> int:
        got = self.lock.acquire(blocking=False)  # clean: near miss, released under the flag
        n = len(self.tiles)
        if got:
            self.lock.release()
        return n


class PersistentKernel:
    def __init__(self, budget: SMBudget, inflight: int = 2) -> None:
        self.budget = budget
        self.gate = threading.Semaphore(inflight)
        self.done: List[Tile] = []

    def _launch(self, tile: Tile) -> None:
        if tile.m < 0:
            raise ValueError(f"bad tile {tile}")
        self.done.append(tile)

    def run_tile(self, tile: Tile) -> bool:
        if not self.budget.reserve(tile.cost):  # clean: unreserved after the launch
            return False
        self._launch(tile)
        self.budget.unreserve(tile.cost)
        return True

    def run_checked(self, tile: Tile) -> bool:
        if not self.budget.reserve(tile.cost):  # leak: the caught launch error returns without unreserve
            return False
        try:
            self._launch(tile)
        except ValueError:
            return False
        self.budget.unreserve(tile.cost)
        return True

    def run_guarded(self, tile: Tile) -> bool:
        if not self.budget.reserve(tile.cost):  # clean: near miss, finally covers the caught error
            return False
        try:
            self._launch(tile)
            return True
        except ValueError:
            return False
        finally:
            self.budget.unreserve(tile.cost)

    def drain(self, queue: TileQueue) -> int:
        n = 0
        while True:
            self.gate.acquire()  # leak: the break on an empty queue keeps the permit
            tile = queue.pop()
            if tile is None:
                break
            self._launch(tile)
            self.gate.release()
            n += 1
        return n

    def drain_bounded(self, queue: TileQueue, limit: int) -> int:
        n = 0
        while n < limit:
            self.gate.acquire()  # clean: near miss, released before the break
            tile = queue.pop()
            if tile is None:
                self.gate.release()
                break
            self._launch(tile)
            self.gate.release()
            n += 1
        return n

    def run_wave(self, tiles: List[Tile], on_done: Callable[[Tile], None]) -> int:
        total = sum(t.cost for t in tiles)
        if not self.budget.reserve(total):  # clean: near miss, given back tile by tile
            return 0
        for tile in tiles:
            self._launch(tile)
            on_done(tile)
            self.budget.unreserve(tile.cost)
        return len(tiles)

    def run_two_phase(self, load: Tile, mma: Tile) -> bool:
        if not self.budget.reserve(load.cost):  # leak: the second reservation fails and the first is not rolled back
            return False
        if not self.budget.reserve(mma.cost):  # clean: unreserved below
            return False
        self._launch(load)
        self._launch(mma)
        self.budget.unreserve(load.cost)
        self.budget.unreserve(mma.cost)
        return True

    def run_fused(self, load: Tile, mma: Tile) -> bool:
        ok = self.budget.reserve(load.cost)  # clean: near miss, unreserved here or rolled back in _second
        if ok:
            ok = self._second(load, mma)  # clean: unreserved below
        if not ok:
            return False
        self._launch(load)
        self._launch(mma)
        self.budget.unreserve(load.cost)
        self.budget.unreserve(mma.cost)
        return True

    def _second(self, load: Tile, mma: Tile) -> bool:
        if self.budget.reserve(mma.cost):  # clean: the caller unreserves both
            return True
        self.budget.unreserve(load.cost)
        return False

    def run_with_retry(self, tile: Tile, attempts: int = 3) -> bool:
        for _ in range(attempts):
            if not self.budget.reserve(tile.cost):  # leak: each failed attempt reserves again without giving back
                continue
            try:
                self._launch(tile)
            except ValueError:
                continue
            self.budget.unreserve(tile.cost)
            return True
        return False


def main() -> None:
    budget = SMBudget(8)
    kern = PersistentKernel(budget, inflight=4)
    q = TileQueue([Tile(i, 0) for i in range(6)])
    other = TileQueue([Tile(9, 9), Tile(8, 8)])
    print(q.steal(other), q.steal_half(other), q.size_hint())
    print(kern.drain_bounded(q, 3), kern.run_wave([Tile(0, 1), Tile(1, 1)], lambda t: None))
    print(kern.run_fused(Tile(1, 2, 2), Tile(2, 2, 3)), kern.run_guarded(Tile(-1, 0)))
    print("used:", budget.used)


if __name__ == "__main__":
    main()
