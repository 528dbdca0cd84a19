"""Continuous-batching scheduler: token budget, sequence slots, preemption and chunked prefill."""
from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Optional


class Stage(enum.Enum):
    WAITING = 0
    PREFILL = 1
    DECODE = 2
    DONE = 3


@dataclass(frozen=True)
class Grant:
    tokens: int
    step: int


class TokenBudget:
    """In-flight tokens over all steps; a grant must be refunded when its step has retired."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.step = 0

    def grant(self, tokens: int) -> Optional[Grant]:
        if self.used + tokens > self.capacity:
            return None
        self.used += tokens
        return Grant(tokens, self.step)

    def grant_up_to(self, tokens: int) -> Grant:
        n = min(tokens, self.capacity - self.used)
        self.used += n
        return Grant(n, self.step)

    def refund(self, g: Grant) -> None:
        self.used -= g.tokens


class SeqSlots:
    def __init__(self, n: int) -> None:
        self._bitmap = [False] * n

    def occupy(self) -> int:
        for i, busy in enumerate(self._bitmap):
            if not busy:
                self._bitmap[i] = True
                return i
        return -1

    def clear(self, idx: int) -> None:
        self._bitmap[idx] = False


@dataclass
class Request:
    rid: str
    prompt: int
    max_new: int
    priority: int = 0
    produced: int = 0
    prefilled: int = 0
    slot: int = -1
    stage: Stage = Stage.WAITING
    grants: list[Grant] = field(default_factory=list)
    lookahead: Optional[Grant] = None

    @property
    def finished(self) -> bool:
        return self.produced >= self.max_new


class Scheduler:
    def __init__(self, budget: TokenBudget, slots: SeqSlots, chunk: int) -> None:
        self.budget = budget
        self.slots = slots
        self.chunk = chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.spec_tokens = 0
        self.overlap = False
        self._ahead: Optional[Grant] = None

    # ---- admission -------------------------------------------------------

    def try_start(self, req: Request) -> bool:
        slot = self.slots.occupy()  # clean: moved into the request or cleared again
        if slot < 0:
            return False
        g = self.budget.grant(min(self.chunk, req.prompt))  # clean: moved into the request, or None
        if g is None:
            self.slots.clear(slot)
            return False
        req.slot = slot
        req.grants.append(g)
        req.prefilled = g.tokens
        req.stage = Stage.PREFILL
        return True

    def try_start_whole(self, req: Request) -> bool:
        """Prefill without chunking, for models with bidirectional prefix attention."""
        g = self.budget.grant(req.prompt)  # leak: not refunded when there is no slot
        if g is None:
            return False
        slot = self.slots.occupy()  # clean: moved into the request
        if slot < 0:
            self.waiting.appendleft(req)
            return False
        req.slot = slot
        req.grants.append(g)
        req.prefilled = req.prompt
        req.stage = Stage.PREFILL
        return True

    def fits(self, req: Request) -> bool:
        trial = self.budget.grant(req.prompt + req.max_new)  # clean: near miss, refunded if granted
        if trial:
            self.budget.refund(trial)
        return trial is not None

    def headroom(self, want: int) -> int:
        trial = self.budget.grant_up_to(want)  # leak: only the number survives
        return trial.tokens

    # ---- one step --------------------------------------------------------

    def schedule(self) -> list[Request]:
        batch: list[Request] = []
        for req in self.running:
            if req.stage is Stage.PREFILL and req.prefilled < req.prompt:
                want = min(self.chunk, req.prompt - req.prefilled)
                g = self.budget.grant_up_to(want)  # clean: kept with the request, retire refunds all
                req.grants.append(g)
                req.prefilled += g.tokens
            else:
                g = self.budget.grant(1 + self.spec_tokens)  # clean: kept with the request, or None
                if g is None:
                    continue
                req.grants.append(g)
                req.stage = Stage.DECODE
            batch.append(req)
        while self.waiting:
            head = self.waiting[0]
            if not self.try_start(head):
                break
            self.waiting.popleft()
            self.running.append(head)
            batch.append(head)
        return batch

    def begin_overlap(self, batch: list[Request]) -> None:
        if self.overlap and self._ahead is None:
            self._ahead = self.budget.grant(len(batch))  # clean: near miss, end_overlap has the same test

    def end_overlap(self) -> None:
        if self.overlap:
            if self._ahead is not None:
                self.budget.refund(self._ahead)
            self._ahead = None

    def reserve_lookahead(self, batch: list[Request], k: int) -> int:
        total = 0
        for req in batch:
            if req.lookahead is not None:
                continue
            req.lookahead = self.budget.grant(k)  # leak: finish and preempt refund grants only
            if req.lookahead is not None:
                total += k
        return total

    def retire(self, batch: list[Request], produced: dict[str, int]) -> list[Request]:
        done = []
        for req in batch:
            for g in req.grants:
                self.budget.refund(g)
            req.grants.clear()
            req.produced += produced.get(req.rid, 0)
            if req.finished:
                self.finish(req)
                done.append(req)
        self.budget.step += 1
        return done

    def simulate_best(self, batch: list[Request], sizes: list[int]) -> int:
        best: Optional[Grant] = None
        for size in sorted(sizes):
            g = self.budget.grant(size * len(batch))  # leak: a larger grant replaces best unrefunded
            if g is None:
                break
            best = g
        if best is None:
            return 0
        self.budget.refund(best)
        return best.tokens

    # ---- end of life -----------------------------------------------------

    def finish(self, req: Request) -> None:
        req.stage = Stage.DONE
        for g in req.grants:
            self.budget.refund(g)
        req.grants.clear()
        self.slots.clear(req.slot)
        req.slot = -1
        self.running.remove(req)

    def preempt(self) -> Optional[Request]:
        if not self.running:
            return None
        victim = min(self.running, key=lambda r: r.priority)
        self.finish(victim)
        victim.stage = Stage.WAITING
        victim.prefilled = 0
        self.waiting.appendleft(victim)
        return victim

    def resume_dedicated(self, req: Request) -> int:
        """Give a preempted request a slot of its own before the normal pass."""
        if req.slot >= 0:
            return req.slot
        slot = self.slots.occupy()  # leak: the slot is lost when the request needs no more tokens
        if slot < 0:
            return -1
        if req.finished:
            return -1
        req.slot = slot
        self.running.append(req)
        return slot
