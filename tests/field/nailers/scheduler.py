"""Continuous-batching scheduler: token budget per step, running slots, preemption and aborts."""
from __future__ import annotations

import enum
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Optional


class TokenBudget:
    """Tokens that may be in flight at once over all micro-batches."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0

    def debit(self, tokens: int) -> bool:
        if self.in_use + tokens > self.limit:
            return False
        self.in_use += tokens
        return True

    def credit(self, tokens: int) -> None:
        self.in_use -= tokens


class SlotTable:
    def __init__(self, size: int) -> None:
        self._rows: list[Optional[str]] = [None] * size

    def occupy(self, rid: str) -> int:
        """Row for `rid`, or -1 when the table is full."""
        for row, owner in enumerate(self._rows):
            if owner is None:
                self._rows[row] = rid
                return row
        return -1

    def vacate(self, row: int) -> None:
        self._rows[row] = None


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass
class Request:
    rid: str
    prompt_len: int
    max_new: int
    priority: int = 0
    state: State = State.WAITING
    row: int = -1
    cost: int = 0
    produced: int = 0
    encoder_row: int = -1


@dataclass
class MicroBatch:
    number: int
    requests: list[Request] = field(default_factory=list)
    tokens: int = 0


class Scheduler:
    def __init__(self, budget: TokenBudget, slots: SlotTable, encoder_slots: SlotTable) -> None:
        self.budget = budget
        self.slots = slots
        self.encoder_slots = encoder_slots
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.parked: list[Request] = []
        self.inflight: deque[MicroBatch] = deque()
        self._numbers = itertools.count()

    def add(self, req: Request) -> None:
        req.state = State.WAITING
        self.waiting.append(req)

    def _admit_one(self, req: Request) -> bool:
        row = self.slots.occupy(req.rid)  # clean: vacated when the budget says no, else by finish()
        if row < 0:
            return False
        if not self.budget.debit(req.prompt_len):  # clean: req.cost is credited by finish()
            self.slots.vacate(row)
            return False
        req.row, req.cost = row, req.prompt_len
        req.state = State.RUNNING
        self.running[req.rid] = req
        return True

    def admit(self) -> int:
        admitted = 0
        while self.waiting:
            if not self._admit_one(self.waiting[0]):
                break
            self.waiting.popleft()
            admitted += 1
        return admitted

    def admit_multimodal(self, req: Request) -> bool:
        row = self.slots.occupy(req.rid)  # leak: not vacated when the encoder table is full
        if row < 0:
            return False
        enc = self.encoder_slots.occupy(req.rid)  # clean: stored in encoder_row, finish() vacates it
        if enc < 0:
            self.waiting.append(req)
            return False
        req.row, req.encoder_row = row, enc
        req.state = State.RUNNING
        self.running[req.rid] = req
        return True

    def _release(self, req: Request) -> None:
        if req.row >= 0:
            self.slots.vacate(req.row)
            req.row = -1
        if req.encoder_row >= 0:
            self.encoder_slots.vacate(req.encoder_row)
            req.encoder_row = -1
        if req.cost:
            self.budget.credit(req.cost)
            req.cost = 0

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is None:
            return
        req.state = State.FINISHED
        self._release(req)

    def preempt(self) -> Optional[Request]:
        if not self.running:
            return None
        victim = min(self.running.values(), key=lambda r: (r.priority, -r.produced))
        del self.running[victim.rid]
        victim.state = State.PREEMPTED
        self._release(victim)
        self.parked.append(victim)
        return victim

    def resume(self) -> int:
        """Bring parked requests back, highest priority first."""
        self.parked.sort(key=lambda r: -r.priority)
        resumed = 0
        keep: list[Request] = []
        for req in self.parked:
            need = req.prompt_len + req.produced
            if not self.budget.debit(need):  # leak: no credit when the slot table turns out full
                keep.append(req)
                continue
            row = self.slots.occupy(req.rid)  # clean: stored in the request, finish() vacates it
            if row < 0:
                keep.append(req)
                continue
            req.row, req.cost = row, need
            req.state = State.RUNNING
            self.running[req.rid] = req
            resumed += 1
        self.parked = keep
        return resumed

    def build_decode_batch(self, limit: int) -> Optional[MicroBatch]:
        batch = MicroBatch(next(self._numbers))
        for req in self.running.values():
            if len(batch.requests) == limit:
                break
            if not self.budget.debit(1):  # clean: near miss, retire() credits batch.tokens
                break
            batch.requests.append(req)
            batch.tokens += 1
        if not batch.requests:
            return None
        self.inflight.append(batch)
        return batch

    def retire(self) -> Optional[MicroBatch]:
        if not self.inflight:
            return None
        batch = self.inflight.popleft()
        self.budget.credit(batch.tokens)
        for req in batch.requests:
            req.produced += 1
            if req.produced >= req.max_new:
                self.finish(req.rid)
        return batch

    def dry_run(self, lengths: list[int]) -> int:
        """How many prompts of these lengths would be admitted right now."""
        count = taken = 0
        for n in lengths:
            if not self.budget.debit(n):  # clean: near miss, the sum is credited after the loop
                break
            taken += n
            count += 1
        self.budget.credit(taken)
        return count

    def fits(self, tokens: int) -> bool:
        return self.budget.debit(tokens)  # clean: wrapper, the tokens are the caller's on True

    def route_long_prompt(self, req: Request, threshold: int) -> str:
        if req.prompt_len < threshold:
            return "local"
        if self.fits(req.prompt_len):  # leak: used as a question, the debited tokens are never credited
            return "local-long"
        return "remote"

    def abort(self, rid: str) -> bool:
        for req in list(self.waiting):
            if req.rid == rid:
                self.waiting.remove(req)
                return True
        if rid in self.running:
            self.finish(rid)
            return True
        return False

    def swap_rows(self, first: str, second: str) -> bool:
        """Exchange two rows through a temporary one, as the kernels cannot swap in place."""
        a, b = self.running.get(first), self.running.get(second)
        if a is None or b is None:
            return False
        spare = self.slots.occupy("swap")  # clean: near miss, becomes b's row, a's old one is vacated
        if spare < 0:
            return False
        old = a.row
        a.row, b.row = b.row, spare
        self.slots.vacate(old)
        return True

    def compact(self) -> int:
        moved = 0
        for req in self.running.values():
            target = self.slots.occupy(req.rid)  # leak: a higher row than the old one is not vacated
            if target < 0:
                break
            if target > req.row:
                continue
            self.slots.vacate(req.row)
            req.row = target
            moved += 1
        return moved
