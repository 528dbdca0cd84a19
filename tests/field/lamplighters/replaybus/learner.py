"""The learner pulls segments, keeps some of them, and samples batches."""
import logging
import random
from collections import OrderedDict
from typing import Dict, List, Optional, Tuple

import numpy as np

from replaybus.segments import Segment, SegmentStore, StoreFull
from replaybus.transport import Bus

log = logging.getLogger("replaybus.learner")


class BatchTicket:
    """References to the segments of one batch until the step is done."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self.segments: List[Segment] = []

    def include(self, seg: Segment) -> None:
        self.segments.append(self._store.share(seg))  # clean: settle unrefs each entry

    def settle(self) -> None:
        while self.segments:
            self._store.unref(self.segments.pop())


class Learner:
    def __init__(self, store: SegmentStore, bus: Bus, capacity: int) -> None:
        self.store = store
        self.bus = bus
        self.capacity = capacity
        self._kept: "OrderedDict[int, Segment]" = OrderedDict()
        self._elite: Dict[str, Tuple[float, Segment]] = {}
        self._tickets: List[BatchTicket] = []
        self._target: Optional[Segment] = None

    # -- intake -------------------------------------------------------------
    def intake(self, budget: int) -> int:
        for taken in range(budget):
            seg = self.bus.pull(timeout=0.05)
            if seg is None:
                return taken
            if seg.length < 2:
                self.store.unref(seg)
                continue
            self._kept[id(seg)] = seg
            self._trim()
        return budget

    def intake_filtered(self, budget: int, floor: float) -> int:
        kept = 0
        for _ in range(budget):
            seg = self.bus.pull(timeout=0.05)
            if seg is None:
                break
            if seg.rew[: seg.length].sum() < floor:
                self.store.unref(seg)
                continue
            self._kept[id(seg)] = seg
            self._trim()
            kept += 1
        return kept

    def _trim(self) -> None:
        while len(self._kept) > self.capacity:
            _, seg = self._kept.popitem(last=False)
            self.store.unref(seg)

    # -- sampling -------------------------------------------------------------
    def sample(self, n: int) -> BatchTicket:
        ticket = BatchTicket(self.store)
        for seg in random.sample(list(self._kept.values()), min(n, len(self._kept))):
            ticket.include(seg)
        self._tickets.append(ticket)
        return ticket

    def step_done(self) -> None:
        while self._tickets:
            self._tickets.pop().settle()

    def mean_return(self) -> float:
        total, count = 0.0, 0
        for seg in list(self._kept.values()):
            ref = self.store.share(seg)  # clean: both branches unref before the next turn
            if ref.length:
                total += float(ref.rew[: ref.length].sum())
                count += 1
                self.store.unref(ref)
            else:
                self.store.unref(ref)
        return total / count if count else 0.0

    def audit(self, floor: float) -> List[int]:
        """Identifiers of the kept segments whose return is under ``floor``."""
        poor: List[int] = []
        for seg in list(self._kept.values()):
            ref = self.store.share(seg)  # leak: an empty segment takes the continue and keeps the extra reference
            if ref.length == 0:
                poor.append(ref.ident)
                continue
            if float(ref.rew[: ref.length].sum()) < floor:
                poor.append(ref.ident)
            self.store.unref(ref)
        return poor

    # -- elite ------------------------------------------------------------------
    def promote(self, seg: Segment) -> bool:
        """Keep the best segment of each tag beyond its time in the buffer."""
        score = float(seg.rew[: seg.length].sum())
        best = self._elite.get(seg.tag)
        mine = self.store.share(seg)  # leak: a segment that does not beat the best leaves with False
        if best is not None:
            if best[0] >= score:
                return False
            self.store.unref(best[1])
        self._elite[seg.tag] = (score, mine)
        return True

    def demote_all(self) -> None:
        for _, seg in self._elite.values():
            self.store.unref(seg)
        self._elite.clear()

    # -- targets ----------------------------------------------------------------
    def build_target(self, gamma: float) -> bool:
        """Discounted returns of the newest segment, in a segment of their own."""
        if not self._kept:
            return False
        newest = self.store.share(next(reversed(self._kept.values())))  # clean: unreffed on StoreFull and at the end
        try:
            out = self.store.check_out("target")  # clean: replaces the former target, which is unreffed
        except StoreFull:
            self.store.unref(newest)
            return False
        acc = 0.0
        for i in reversed(range(newest.length)):
            acc = float(newest.rew[i]) + gamma * acc
            out.rew[i] = acc
        out.length = newest.length
        self.store.unref(newest)
        former, self._target = self._target, out
        if former is not None:
            self.store.unref(former)
        return True

    def stack(self, n: int) -> Optional[np.ndarray]:
        ticket = self.sample(n)
        if not ticket.segments:
            return None
        return np.stack([seg.obs for seg in ticket.segments])
