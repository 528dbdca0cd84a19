"""Side streams and events for copy/compute overlap."""
from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, Optional

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger("lanes")


class Lane:
    def __init__(self, idx: int, prio: int) -> None:
        self.idx = idx
        self.prio = prio
        self.stream = torch.cuda.Stream(priority=prio) if torch is not None and torch.cuda.is_available() else None
        self.work: list[str] = []

    def sync(self) -> None:
        self.work.clear()


class LanePool:
    def __init__(self, n: int, hi: int = 1) -> None:
        self._lo = [Lane(i, 0) for i in range(n)]
        self._hi = [Lane(n + i, -1) for i in range(hi)]
        self._mu = threading.Lock()
        self.sem = threading.BoundedSemaphore(n + hi)

    def checkout(self, prio: int = 0) -> Optional[Lane]:
        self.sem.acquire()  # leak: the wanted class is empty, None is returned and the permit stays taken
        with self._mu:
            src = self._hi if prio < 0 else self._lo
            if not src:
                return None
            return src.pop()

    def checkin(self, lane: Lane) -> None:
        with self._mu:
            (self._hi if lane.prio < 0 else self._lo).append(lane)
        self.sem.release()

    def try_checkout(self, prio: int = 0) -> Optional[Lane]:
        if not self.sem.acquire(blocking=False):  # clean: near miss, released when the class is empty, else checkin does
            return None
        with self._mu:
            src = self._hi if prio < 0 else self._lo
            lane = src.pop() if src else None
        if lane is None:
            self.sem.release()
        return lane

    def n(self) -> int:
        return len(self._lo) + len(self._hi)


class EventPool:
    def __init__(self) -> None:
        self._spare: list[dict] = []
        self.made = 0

    def lease(self) -> dict:
        if self._spare:
            return self._spare.pop()
        self.made += 1
        return {"id": self.made, "recorded": False}

    def retire(self, ev: dict) -> None:
        ev["recorded"] = False
        self._spare.append(ev)


class on_lane:
    """with on_lane(pool) as lane: ..."""

    def __init__(self, pool: LanePool, prio: int = 0) -> None:
        self.pool = pool
        self.prio = prio
        self.lane: Optional[Lane] = None

    def __enter__(self) -> Lane:
        lane = self.pool.try_checkout(self.prio)  # leak: an exception in the body makes __exit__ return before checkin
        if lane is None:
            raise RuntimeError("no lane")
        self.lane = lane
        return lane

    def __exit__(self, et: Any, ev: Any, tb: Any) -> bool:
        assert self.lane is not None
        if et is not None:
            log.error("lane %d failed: %s", self.lane.idx, ev)
            return True
        self.lane.sync()
        self.pool.checkin(self.lane)
        return False


class lane_scope:
    """Re-entrant; falls back to the default stream when the pool is dry."""

    def __init__(self, pool: LanePool) -> None:
        self.pool = pool
        self.depth = 0
        self.lane: Optional[Lane] = None

    def __enter__(self) -> Optional[Lane]:
        self.depth += 1
        if self.depth == 1:
            self.lane = self.pool.try_checkout()  # clean: near miss, the early exit of __exit__ is for inner levels or no lane only
        return self.lane

    def __exit__(self, *exc: Any) -> None:
        self.depth -= 1
        if self.depth > 0 or self.lane is None:
            return
        lane, self.lane = self.lane, None
        lane.sync()
        self.pool.checkin(lane)


@contextmanager
def borrowed_lane(pool: LanePool, name: str) -> Iterator[Lane]:
    lane = pool.try_checkout()  # leak: no try around the yield, a caller that survives the body's exception loses it
    if lane is None:
        raise RuntimeError("no lane")
    lane.work.append(name)
    yield lane
    lane.sync()
    pool.checkin(lane)


class CopyEngine:
    def __init__(self, lanes: LanePool, events: EventPool, use_side: bool = False) -> None:
        self.lanes = lanes
        self.events = events
        self.use_side = use_side
        self.inflight: list[tuple[Lane, dict]] = []
        self.last: Optional[dict] = None
        self.h2d: Optional[Lane] = None

    def run(self, name: str, fn: Callable[[Lane], None]) -> bool:
        try:
            with borrowed_lane(self.lanes, name) as lane:  # clean: context manager
                fn(lane)
        except ValueError as e:
            log.warning("%s: %s", name, e)
            return False
        return True

    def submit(self, name: str) -> bool:
        lane = self.lanes.try_checkout()  # clean: moved to inflight, reap gives it back
        if lane is None:
            return False
        lane.work.append(name)
        ev = self.events.lease()  # clean: moved to inflight, reap retires it
        ev["recorded"] = True
        self.inflight.append((lane, ev))
        return True

    def reap(self, force: bool = False) -> int:
        keep, n = [], 0
        for lane, ev in self.inflight:
            if not force and lane.work:
                keep.append((lane, ev))
                continue
            self.events.retire(ev)
            lane.sync()
            self.lanes.checkin(lane)
            n += 1
        self.inflight = keep
        return n

    def mark(self) -> None:
        """Remember where we are so that the next h2d waits on it."""
        ev = self.events.lease()  # leak: the previous mark in last is overwritten
        ev["recorded"] = True
        self.last = ev

    def start(self) -> None:
        if self.use_side and self.h2d is None:
            self.h2d = self.lanes.checkout(prio=-1)  # clean: near miss, start and stop test the same flag and field

    def stop(self) -> None:
        if self.use_side and self.h2d is not None:
            self.lanes.checkin(self.h2d)
            self.h2d = None

    def fan_out(self, names: list[str]) -> int:
        with ExitStack() as st:
            got = 0
            for n in names:
                lane = self.lanes.try_checkout()  # clean: near miss, the exit stack gives it back
                if lane is None:
                    break
                st.callback(self.lanes.checkin, lane)
                lane.work.append(n)
                got += 1
            return got

    def pipeline(self, chunks: list[bytes]) -> int:
        cur = self.lanes.checkout()  # leak: rebound by nxt at the first chunk boundary
        total = 0
        for c in chunks:
            nxt = self.lanes.try_checkout()  # leak: becomes cur and is rebound at the next boundary
            if cur is not None:
                cur.work.append(str(len(c)))
                total += len(c)
            cur = nxt
        if cur is not None:
            self.lanes.checkin(cur)
        return total


if __name__ == "__main__":
    p = LanePool(3)
    ce = CopyEngine(p, EventPool(), use_side=True)
    ce.submit("x"); ce.reap(force=True)
    with lane_scope(p):  # clean: context manager
        pass
    print(ce.run("r", lambda l: None), ce.fan_out(["a", "b", "c", "d", "e"]), p.n())
    ce.start(); ce.stop()
    print(p.n(), len(ce.events._spare), ce.events.made)
