"""Pages Adam state between host and device during the nightly runs.

Every parameter group has a lock (the all-gather thread and the step thread both touch it)
and its state lives in frames of a FrameStore while the group is stepped.
"""
from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set

_log = logging.getLogger(__name__)


class FrameStore:
    def __init__(self, frames: int) -> None:
        self._avail: List[int] = list(range(frames))
        self._cond = threading.Condition()

    def page_in(self) -> Optional[int]:
        with self._cond:
            return self._avail.pop() if self._avail else None

    def page_out(self, frame: int) -> None:
        with self._cond:
            self._avail.append(frame)
            self._cond.notify()

    def page_in_wait(self, timeout: float) -> int:
        with self._cond:
            if not self._cond.wait_for(lambda: self._avail, timeout):
                raise TimeoutError("no frame")
            return self._avail.pop()

    def free(self) -> int:
        return len(self._avail)


class ParamGroup:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.lock = threading.Lock()
        self.exp_avg: Optional[int] = None
        self.exp_avg_sq: Optional[int] = None
        self.master: Optional[int] = None
        self.grad: Optional[int] = None
        self.frozen = False
        self.steps = 0


class OptimizerPager:
    def __init__(self, store: FrameStore, groups: List[ParamGroup]) -> None:
        self.store = store
        self.groups = {g.name: g for g in groups}
        self.skipped: Set[str] = set()

    # -- residency -------------------------------------------------------------
    def make_resident(self, g: ParamGroup) -> bool:
        if g.exp_avg is not None:
            return True
        first = self.store.page_in()  # clean: paged out where the second is missing, else the group's
        if first is None:
            return False
        second = self.store.page_in()  # clean: the group's
        if second is None:
            self.store.page_out(first)
            return False
        g.exp_avg, g.exp_avg_sq = first, second
        return True

    def make_resident_amp(self, g: ParamGroup) -> bool:
        """With fp32 master weights: three frames."""
        self.evict(g)
        frames = [self.store.page_in() for _ in range(3)]  # clean: near miss, what is not None is paged out again
        if None in frames:
            for f in frames:
                if f is not None:
                    self.store.page_out(f)
            return False
        g.exp_avg, g.exp_avg_sq, g.master = frames
        return True

    def make_resident_fast(self, g: ParamGroup, timeout: float = 0.01) -> bool:
        if g.exp_avg is not None:
            return True
        try:
            avg = self.store.page_in_wait(timeout)  # leak: a timeout on the second frame is caught with this one taken
            sq = self.store.page_in_wait(timeout)  # clean: the group's
        except TimeoutError:
            self.skipped.add(g.name)
            return False
        g.exp_avg, g.exp_avg_sq = avg, sq
        return True

    def evict(self, g: ParamGroup) -> None:
        for attr in ("exp_avg", "exp_avg_sq", "master", "grad"):
            frame = getattr(g, attr)
            if frame is not None:
                self.store.page_out(frame)
                setattr(g, attr, None)

    # -- stepping --------------------------------------------------------------
    def step_group(self, g: ParamGroup) -> bool:
        g.lock.acquire()  # leak: a frozen group returns with its lock taken
        if g.frozen:
            return False
        ok = self.make_resident(g)
        if ok:
            g.steps += 1
            self.evict(g)
        g.lock.release()
        return ok

    def step_all(self) -> int:
        n = 0
        for g in self.groups.values():
            if not g.lock.acquire(blocking=False):  # clean: near miss, continue only where it was not taken
                self.skipped.add(g.name)
                continue
            try:
                if g.frozen:
                    continue
                if self.make_resident(g):
                    g.steps += 1
                    n += 1
                    self.evict(g)
            finally:
                g.lock.release()
        return n

    def step_some(self, names: Iterable[str]) -> int:
        n = 0
        for name in names:
            g = self.groups[name]
            g.lock.acquire()  # leak: a group that cannot be made resident continues with its lock taken
            if not self.make_resident(g):
                self.skipped.add(name)
                continue
            g.steps += 1
            self.evict(g)
            g.lock.release()
            n += 1
        return n

    def swap_groups(self, a: str, b: str) -> None:
        lo, hi = sorted((self.groups[a], self.groups[b]), key=lambda g: g.name)
        lo.lock.acquire()  # clean: finally, outer
        try:
            hi.lock.acquire()  # clean: finally, inner
            try:
                lo.exp_avg, hi.exp_avg = hi.exp_avg, lo.exp_avg
                lo.exp_avg_sq, hi.exp_avg_sq = hi.exp_avg_sq, lo.exp_avg_sq
            finally:
                hi.lock.release()
        finally:
            lo.lock.release()

    def try_both(self, a: ParamGroup, b: ParamGroup) -> bool:
        """Take two group locks for a fused kernel; the caller unlocks through unlock_both."""
        if not a.lock.acquire(timeout=0.1):  # leak: stays taken when the second lock is busy
            return False
        if not b.lock.acquire(timeout=0.1):  # clean: released through unlock_both
            return False
        return True

    def unlock_both(self, a: ParamGroup, b: ParamGroup) -> None:
        b.lock.release()
        a.lock.release()

    def fused_step(self, a: ParamGroup, b: ParamGroup) -> bool:
        if not self.try_both(a, b):  # clean: near miss, unlocked in finally after success
            return False
        try:
            a.steps += 1
            b.steps += 1
        finally:
            self.unlock_both(a, b)
        return True

    # -- scratch -----------------------------------------------------------------
    @contextlib.contextmanager
    def scratch(self, want: bool) -> Iterator[Optional[int]]:
        frame = self.store.page_in() if want else None  # clean: near miss, paged out if not None
        try:
            yield frame
        finally:
            if frame is not None:
                self.store.page_out(frame)

    def grad_norm(self, g: ParamGroup, exact: bool) -> float:
        frame = None
        if exact:
            frame = self.store.page_in()  # leak: a frozen group returns before the guarded page_out
        if g.frozen:
            return 0.0
        norm = float(g.size) ** 0.5 if frame is not None else float(g.size)
        if exact and frame is not None:
            self.store.page_out(frame)
        return norm

    def clip(self, g: ParamGroup, exact: bool, limit: float) -> float:
        with self.scratch(exact) as frame:  # clean: with
            norm = float(g.size) ** 0.5 if frame is not None else float(g.size)
            if norm <= limit:
                return 1.0
            return limit / norm

    def stage_grads(self) -> int:
        """Frames for the gradients of the coming step, small groups first."""
        staged = 0
        for g in sorted(self.groups.values(), key=lambda g: g.size):
            if g.frozen:
                continue
            frame = self.store.page_in()  # leak: a group staged before and not stepped since has its frame overwritten
            if frame is None:
                break
            g.grad = frame
            staged += 1
        return staged
