"""Slot-based continuous batching loop."""
from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Iterable, Optional

log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    pass


class SlotTable:
    """Rows of the persistent batch."""

    def __init__(self, n: int) -> None:
        self._idle = deque(range(n))
        self._lock = threading.Lock()

    def reserve(self) -> Optional[int]:
        with self._lock:  # clean: with
            return self._idle.popleft() if self._idle else None

    def unreserve(self, slot: int) -> None:
        with self._lock:  # clean: with
            self._idle.append(slot)


class TokenBudget:
    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def charge(self, n: int) -> bool:
        if n > self._left:
            return False
        self._left -= n
        return True

    def refund(self, n: int) -> None:
        self._left += n


@dataclass
class Request:
    rid: str
    prompt: list[int]
    max_new: int
    slot: Optional[int] = None
    charged: int = 0
    out: list[int] = field(default_factory=list)
    cancelled: bool = False


class BatchEngine:
    def __init__(self, slots: int, tokens: int, step: Callable[[list[Request]], list[int]]) -> None:
        self.slots = SlotTable(slots)
        self.budget = TokenBudget(tokens)
        self.step = step
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self._scratch_slot: Optional[int] = None

    def _admit_one(self, req: Request) -> bool:
        cost = len(req.prompt) + req.max_new
        if not self.budget.charge(cost):  # leak: not refunded when there is no slot
            return False
        slot = self.slots.reserve()  # clean: moved into the request, _retire gives it back
        if slot is None:
            return False
        req.slot, req.charged = slot, cost
        self.running[req.rid] = req
        return True

    def _admit_priority(self, req: Request) -> bool:
        cost = len(req.prompt) + req.max_new
        slot = self.slots.reserve()  # clean: near miss, unreserved if the budget refuses
        if slot is None:
            return False
        if not self.budget.charge(cost):  # clean: moved into the request
            self.slots.unreserve(slot)
            return False
        req.slot, req.charged = slot, cost
        self.running[req.rid] = req
        return True

    def admit(self) -> int:
        n = 0
        while self.waiting and self._admit_one(self.waiting[0]):
            self.waiting.popleft()
            n += 1
        return n

    def _retire(self, req: Request) -> None:
        self.running.pop(req.rid, None)
        if req.slot is not None:
            self.slots.unreserve(req.slot)
            req.slot = None
        self.budget.refund(req.charged)
        req.charged = 0

    def run_step(self) -> None:
        batch = list(self.running.values())
        if not batch:
            return
        for req, tok in zip(batch, self.step(batch)):
            req.out.append(tok)
            if req.cancelled or len(req.out) >= req.max_new:
                self._retire(req)

    def prefill_burst(self, reqs: Iterable[Request], run: Callable[[Request, int], int]) -> list[int]:
        """One-shot prefill for scoring requests, which never enter the batch."""
        results = []
        for req in reqs:
            slot = self.slots.reserve()  # leak: continue after an engine error skips unreserve
            if slot is None:
                break
            try:
                score = run(req, slot)
            except EngineError:
                log.warning("scoring %s failed", req.rid)
                continue
            results.append(score)
            self.slots.unreserve(slot)
        return results

    def embed_burst(self, reqs: Iterable[Request], run: Callable[[Request, int], int]) -> list[int]:
        results = []
        for req in reqs:
            slot = self.slots.reserve()  # clean: near miss, the finally runs on continue too
            if slot is None:
                break
            try:
                if req.cancelled:
                    continue
                results.append(run(req, slot))
            except EngineError:
                log.warning("embedding %s failed", req.rid)
                continue
            finally:
                self.slots.unreserve(slot)
        return results

    def with_retry(self, req: Request, run: Callable[[Request, int], int], attempts: int = 3) -> Optional[int]:
        for attempt in range(attempts):
            slot = self.slots.reserve()  # leak: each failed attempt keeps its slot
            if slot is None:
                return None
            try:
                value = run(req, slot)
                self.slots.unreserve(slot)
                return value
            except EngineError:
                log.info("attempt %d of %s failed", attempt, req.rid)
        return None

    def set_scratch(self) -> None:
        """Called whenever the graph is recaptured."""
        self._scratch_slot = self.slots.reserve()  # leak: the earlier scratch slot is overwritten

    def close(self) -> None:
        for req in list(self.running.values()):
            self._retire(req)
        if self._scratch_slot is not None:
            self.slots.unreserve(self._scratch_slot)
            self._scratch_slot = None

    def migrate(self, req: Request) -> bool:
        """Move a running request to another row, so that rows stay dense."""
        new = self.slots.reserve()  # clean: takes the place of the old row, which is unreserved
        if new is None or req.slot is None:
            if new is not None:
                self.slots.unreserve(new)
            return False
        old, req.slot = req.slot, new
        self.slots.unreserve(old)
        return True

    def preempt_for(self, req: Request, victim: Request) -> bool:
        slot = victim.slot
        if slot is None:
            slot = self.slots.reserve()  # leak: lost when the request was cancelled meanwhile
            if slot is None:
                return False
        if req.cancelled:
            return False
        victim.slot = None
        self.running.pop(victim.rid, None)
        self.budget.refund(victim.charged)
        victim.charged = 0
        self.waiting.append(victim)
        req.slot = slot
        self.running[req.rid] = req
        return True


if __name__ == "__main__":
    eng = BatchEngine(2, 100, lambda b: [0] * len(b))
    eng.waiting.extend(Request(str(i), [1, 2], 3) for i in range(4))
    for _ in range(12):
        eng.admit()
        eng.run_step()
    assert not eng.running
