"""Weight and KV offload worker. Threads move blocks between device and pinned host memory."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional


class HostArena:
    """Pinned regions of one size."""

    def __init__(self, regions: int) -> None:
        self._cv = threading.Condition()
        self._regions = list(range(regions))

    def pin_region(self, timeout: Optional[float] = None) -> Optional[int]:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._regions), timeout):
                return None
            return self._regions.pop()

    def unpin_region(self, region: int) -> None:
        with self._cv:
            self._regions.append(region)
            self._cv.notify()

    def available(self) -> int:
        with self._cv:
            return len(self._regions)


@dataclass
class Move:
    block: int
    region: int
    to_host: bool = True
    cancelled: bool = False


class OffloadWorker:
    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self.q: "queue.Queue[Optional[Move]]" = queue.Queue()
        self.resident: Dict[int, int] = {}
        self.stats_lock = threading.Lock()
        self.move_lock = threading.RLock()
        self.moved = 0
        self.errors: List[str] = []
        self.paused = False
        self.thread = threading.Thread(target=self._loop, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.q.put(None)
        self.thread.join()

    def _loop(self) -> None:
        while True:
            move = self.q.get()
            if move is None:
                break
            if move.cancelled:
                self.arena.unpin_region(move.region)
                continue
            with self.move_lock:
                former = self.resident.pop(move.block, None)
                if former is not None:
                    self.arena.unpin_region(former)
                self.resident[move.block] = move.region
            self.count(1)

    def offload(self, block: int) -> Optional[Move]:
        region = self.arena.pin_region(0.01)  # clean: travels in the queued move, the loop keeps it in resident or unpins it
        if region is None:
            return None
        move = Move(block, region)
        self.q.put(move)
        return move

    def offload_unless_paused(self, block: int) -> bool:
        region = self.arena.pin_region(0.01)  # leak: paused worker returns False with the region pinned
        if region is None or self.paused:
            return False
        self.q.put(Move(block, region))
        return True

    def offload_all(self, blocks: List[int]) -> int:
        regions: List[int] = []
        for _ in blocks:
            r = self.arena.pin_region(0.01)  # clean: near miss, unpinned when the set is incomplete, queued otherwise
            if r is None:
                break
            regions.append(r)
        if len(regions) < len(blocks):
            for r in regions:
                self.arena.unpin_region(r)
            return 0
        for block, r in zip(blocks, regions):
            self.q.put(Move(block, r))
        return len(regions)

    def offload_group(self, blocks: List[int]) -> int:
        regions: List[int] = []
        for _ in blocks:
            r = self.arena.pin_region(0.01)  # leak: an incomplete group returns 0 and drops the regions that it got
            if r is None:
                return 0
            regions.append(r)
        for block, r in zip(blocks, regions):
            self.q.put(Move(block, r))
        return len(regions)

    def evict(self, block: int) -> bool:
        with self.move_lock:
            region = self.resident.pop(block, None)
        if region is None:
            return False
        self.arena.unpin_region(region)
        return True

    def count(self, n: int) -> None:
        self.stats_lock.acquire()  # clean: released in the finally
        try:
            self.moved += n
        finally:
            self.stats_lock.release()

    def report(self, brief: bool) -> str:
        self.stats_lock.acquire()  # leak: the brief way returns with the lock held
        text = f"moved={self.moved}"
        if brief:
            return text
        text += f" errors={len(self.errors)}"
        self.stats_lock.release()
        return text

    def try_count(self, n: int) -> bool:
        if not self.stats_lock.acquire(blocking=False):  # clean: near miss, returns early only when it was not taken
            return False
        self.moved += n
        self.stats_lock.release()
        return True

    def try_reset(self) -> bool:
        got = self.stats_lock.acquire(timeout=0.1)  # clean: near miss, released under the flag that it answered
        if got:
            self.moved = 0
        self.errors.clear()
        if got:
            self.stats_lock.release()
        return got

    def move_back(self, block: int) -> Optional[int]:
        self.move_lock.acquire()  # leak: caught KeyError returns None before release
        try:
            region = self.resident.pop(block)
        except KeyError:
            return None
        self.move_lock.release()
        self.arena.unpin_region(region)
        return region

    def rebalance(self, blocks: List[int]) -> int:
        n = 0
        for block in blocks:
            self.move_lock.acquire()  # leak: continue for blocks that are not resident skips release
            if block not in self.resident:
                continue
            n += 1
            self.move_lock.release()
        return n

    def sweep(self, blocks: List[int]) -> int:
        n = 0
        for block in blocks:
            self.move_lock.acquire()  # clean: near miss, the continue releases first
            if block not in self.resident:
                self.move_lock.release()
                continue
            self.arena.unpin_region(self.resident.pop(block))
            self.move_lock.release()
            n += 1
        return n

    def bounce(self, block: int, tries: int) -> bool:
        """Copies a block through a temporary region."""
        region: Optional[int] = None
        while tries > 0:
            region = self.arena.pin_region(0.01)  # leak: an even region is tried again without unpinning
            if region is not None and region % 2 == 1:
                break
            tries -= 1
        if tries == 0 or region is None:
            return False
        self.count(1)
        self.arena.unpin_region(region)
        return True


def main() -> None:
    arena = HostArena(7)
    w = OffloadWorker(arena)
    w.start()
    w.offload(1)
    w.offload_all([2, 3])
    w.offload_group([4])
    w.offload_unless_paused(5)
    w.stop()
    w.report(False)
    w.try_count(1)
    w.try_reset()
    w.move_back(1)
    w.rebalance([2])
    w.sweep([2, 9])
    for b in (3, 4, 5):
        w.evict(b)
    w.bounce(0, 1)
    assert arena.available() >= 6


if __name__ == "__main__":
    main()
