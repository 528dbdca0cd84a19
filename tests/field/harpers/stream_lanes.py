"""Side streams, priorities and permits for overlapping copies with attention kernels."""
from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import Callable

import torch

log = logging.getLogger(__name__)


class Lane:
    def __init__(self, index: int, priority: int):
        self.index = index
        self.priority = priority
        self.stream = torch.cuda.Stream(priority=priority)
        self.jobs = 0


class LanePool:
    """High and normal priority streams. get_lane and put_lane are the two halves."""

    def __init__(self, normal: int, high: int):
        self._lanes = {0: deque(Lane(i, 0) for i in range(normal)), -1: deque(Lane(i, -1) for i in range(high))}
        self._mu = threading.Lock()

    def get_lane(self, priority: int = 0) -> Lane | None:
        with self._mu:
            lanes = self._lanes[priority]
            return lanes.popleft() if lanes else None

    def put_lane(self, lane: Lane) -> None:
        with self._mu:
            self._lanes[lane.priority].append(lane)


class CopyPermits:
    """Bounds the copies in flight per direction."""

    def __init__(self, n: int):
        self._n = n
        self._cv = threading.Condition()

    def down(self, timeout: float | None = None) -> bool:
        with self._cv:
            if not self._cv.wait_for(lambda: self._n > 0, timeout):
                return False
            self._n -= 1
            return True

    def up(self) -> None:
        with self._cv:
            self._n += 1
            self._cv.notify()


class CopyJob(ABC):
    def __init__(self, pool: LanePool, permits: CopyPermits):
        self.pool, self.permits = pool, permits
        self.lane: Lane | None = None

    def begin(self) -> bool:
        self.lane = self.pool.get_lane(self.priority())  # clean: near miss, put back in end, which run calls when begin was true
        return self.lane is not None

    def run(self) -> bool:
        if not self.begin():
            return False
        try:
            with torch.cuda.stream(self.lane.stream):
                self.work()
        finally:
            self.end()
        return True

    def end(self) -> None:
        lane, self.lane = self.lane, None
        if lane is not None:
            self.pool.put_lane(lane)

    def priority(self) -> int:
        return 0

    @abstractmethod
    def work(self) -> None: ...


class SwapOut(CopyJob):
    def __init__(self, pool: LanePool, permits: CopyPermits, blocks: torch.Tensor, host: torch.Tensor):
        super().__init__(pool, permits)
        self.blocks, self.host = blocks, host

    def priority(self) -> int:
        return -1

    def work(self) -> None:
        if not self.permits.down(timeout=1.0):  # leak: an empty block list returns without up
            log.warning("swap-out without a permit")
            return
        if self.blocks.numel() == 0:
            return
        self.host.copy_(self.blocks, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self.permits.up()


class SwapIn(CopyJob):
    """Overrides end to count, and does what the base does as well."""

    served = 0

    def __init__(self, pool: LanePool, permits: CopyPermits, host: torch.Tensor, blocks: torch.Tensor):
        super().__init__(pool, permits)
        self.host, self.blocks = host, blocks

    def work(self) -> None:
        if not self.permits.down():  # clean: false holds nothing, else up follows
            return
        self.blocks.copy_(self.host, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self.permits.up()

    def end(self) -> None:
        SwapIn.served += 1
        super().end()


class LayerCopy:
    """Copies one layer at a time and keeps how long each took."""

    def __init__(self, pool: LanePool):
        self.pool = pool
        self.lane: Lane | None = None
        self.history: list[tuple[int, float]] = []

    def begin(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self.lane = self.pool.get_lane()  # leak: end sets the attribute to None without put_lane
        if self.lane is None:
            dst.copy_(src)
            return
        with torch.cuda.stream(self.lane.stream):
            dst.copy_(src, non_blocking=True)

    def end(self) -> None:
        if self.lane is None:
            return
        start = time.monotonic()
        self.lane.stream.synchronize()
        self.history.append((self.lane.index, time.monotonic() - start))
        self.lane = None


def copy_layers(pool: LanePool, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, float]]:
    copier = LayerCopy(pool)
    for src, dst in pairs:
        copier.begin(src, dst)
        copier.end()
    return copier.history


def lane_or_high(pool: LanePool) -> Lane | None:
    lane = pool.get_lane()  # clean: returned
    if lane is None:
        lane = pool.get_lane(-1)  # clean: near miss, the former was None; returned
    return lane


def fire(pool: LanePool, fn: Callable[[], None]) -> int:
    """Starts fn on some lane and tells its index."""
    lane = lane_or_high(pool)  # leak: only the index leaves the function
    if lane is None:
        fn()
        return -1
    lane.jobs += 1
    with torch.cuda.stream(lane.stream):
        fn()
    return lane.index


@contextmanager
def lane_scope(pool: LanePool, priority: int = 0):
    lane = pool.get_lane(priority)  # clean: put back when the scope ends
    try:
        yield lane
    finally:
        if lane is not None:
            pool.put_lane(lane)


def overlap(pool: LanePool, fns: list[Callable[[], None]]) -> None:
    with ExitStack() as stack:
        for fn in fns:
            lane = stack.enter_context(lane_scope(pool))  # clean: near miss, ended by the exit stack
            if lane is None:
                fn()
                continue
            with torch.cuda.stream(lane.stream):
                fn()


def overlap_callbacks(pool: LanePool, fns: list[Callable[[], None]]) -> int:
    started = 0
    with ExitStack() as stack:
        for fn in fns:
            lane = pool.get_lane()  # clean: near miss, put back by the stack's callback
            if lane is None:
                break
            stack.callback(pool.put_lane, lane)
            with torch.cuda.stream(lane.stream):
                fn()
            started += 1
    return started


def overlap_detached(pool: LanePool, fns: list[Callable[[], None]]) -> int:
    started = 0
    with ExitStack() as stack:
        for fn in fns:
            lane = pool.get_lane()  # leak: pop_all moves the callbacks away and nobody closes the new stack
            if lane is None:
                break
            stack.callback(pool.put_lane, lane)
            with torch.cuda.stream(lane.stream):
                fn()
            started += 1
        stack.pop_all()
    return started


class LaneKeeper(threading.local):
    """A lane per thread, kept until leave()."""

    lane: Lane | None = None

    def enter(self, pool: LanePool) -> Lane | None:
        if self.lane is None:
            self.lane = pool.get_lane()  # clean: near miss, got once per thread and put back by leave
        return self.lane

    def leave(self, pool: LanePool) -> None:
        if self.lane is not None:
            pool.put_lane(self.lane)
            self.lane = None


def copy_worker(pool: LanePool, permits: CopyPermits, jobs: deque, stop: threading.Event) -> int:
    done = 0
    while not stop.is_set():
        if not permits.down(timeout=0.1):  # leak: with no job waiting the loop goes round without up
            continue
        if not jobs:
            time.sleep(0.01)
            continue
        src, dst = jobs.popleft()
        dst.copy_(src, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        permits.up()
        done += 1
    return done


class LayerLocks:
    """One lock per layer, for loaders and for the runner."""

    def __init__(self, layers: int):
        self.locks = [threading.Lock() for _ in range(layers)]

    def try_all(self) -> bool:
        got: list[threading.Lock] = []
        for lock in self.locks:
            if not lock.acquire(blocking=False):  # clean: near miss, those got are released when one is refused, else by unlock_all
                for other in got:
                    other.release()
                return False
            got.append(lock)
        return True

    def unlock_all(self) -> None:
        for lock in self.locks:
            lock.release()

    def update(self, layer: int, apply: Callable[[int], bool]) -> bool:
        lock = self.locks[layer]
        lock.acquire()  # leak: the return for a failed apply keeps the lock
        if not apply(layer):
            log.info("layer %d unchanged", layer)
            return False
        lock.release()
        return True


def swap_weights(locks: LayerLocks, install: Callable[[], None]) -> bool:
    if not locks.try_all():  # clean: unlock_all follows
        return False
    install()
    locks.unlock_all()
    return True
