"""Continuous-batching scheduler: a token budget, sequence slots, preemption and chunked prefill."""
from __future__ import annotations

import enum
import time
from collections import deque
from dataclasses import dataclass, field


class Phase(enum.Enum):
    WAITING = 0
    PREFILL = 1
    DECODE = 2
    DONE = 3


@dataclass
class Grant:
    tokens: int
    spent: int = 0


class TokenBudget:
    def __init__(self, per_step: int):
        self.per_step = per_step
        self.left = per_step

    def grant(self, want: int) -> Grant | None:
        if want > self.left:
            return None
        self.left -= want
        return Grant(want)

    def grant_upto(self, want: int) -> Grant | None:
        return self.grant(min(want, self.left)) if self.left else None  # clean: handed to the caller

    def refund(self, grant: Grant) -> None:
        self.left += grant.tokens


class SequenceSlots:
    """Rows of the persistent batch."""

    def __init__(self, rows: int):
        self._rows = list(range(rows))
        self.owner: dict[int, str] = {}

    def claim(self, rid: str) -> int:
        if not self._rows:
            return -1
        row = self._rows.pop()
        self.owner[row] = rid
        return row

    def vacate(self, row: int) -> None:
        self.owner.pop(row, None)
        self._rows.append(row)

    def claim_aligned(self, rid: str, align: int) -> int:
        tries = len(self._rows)
        while tries > 0 and self._rows:
            row = self._rows.pop()  # leak: a row that is not aligned is popped and never put back
            tries -= 1
            if row % align == 0:
                self.owner[row] = rid
                return row
        return -1


@dataclass
class Seq:
    rid: str
    prompt_len: int
    computed: int = 0
    row: int = -1
    grant: Grant | None = None
    phase: Phase = Phase.WAITING
    arrived: float = field(default_factory=time.monotonic)


class Scheduler:
    def __init__(self, budget: TokenBudget, slots: SequenceSlots, chunk: int):
        self.budget = budget
        self.slots = slots
        self.chunk = chunk
        self.waiting: deque[Seq] = deque()
        self.running: list[Seq] = []
        self.rejected: list[str] = []

    def add(self, seq: Seq) -> None:
        self.waiting.append(seq)

    def admit_waiting(self) -> int:
        started = 0
        while self.waiting:
            seq = self.waiting[0]
            row = self.slots.claim(seq.rid)  # clean: vacated without a grant, else by reap or preemption
            if row < 0:
                break
            grant = self.budget.grant_upto(min(self.chunk, seq.prompt_len))  # clean: settle refunds seq.grant
            if grant is None:
                self.slots.vacate(row)
                break
            self.waiting.popleft()
            seq.row, seq.grant, seq.phase = row, grant, Phase.PREFILL
            self.running.append(seq)
            started += 1
        return started

    def admit_priority(self, seq: Seq) -> bool:
        row = self.slots.claim(seq.rid)  # leak: the row is lost when the budget refuses
        if row < 0:
            return False
        grant = self.budget.grant(seq.prompt_len)  # clean: settle refunds it
        if grant is None:
            self.waiting.appendleft(seq)
            return False
        seq.row, seq.grant, seq.phase = row, grant, Phase.PREFILL
        self.running.append(seq)
        return True

    def settle(self) -> None:
        for seq in self.running:
            if seq.grant is None:
                continue
            seq.computed += seq.grant.tokens
            self.budget.refund(seq.grant)
            seq.grant = None
            if seq.computed >= seq.prompt_len:
                seq.phase = Phase.DECODE

    def continue_chunks(self) -> None:
        for seq in self.running:
            if seq.phase is not Phase.PREFILL or seq.grant is not None:
                continue
            grant = self.budget.grant_upto(seq.prompt_len - seq.computed)  # clean: near miss, settle refunds
            if grant is None:
                break
            seq.grant = grant

    def decode_round(self) -> list[str]:
        stepped: list[str] = []
        for seq in self.running:
            if seq.phase is not Phase.DECODE:
                continue
            grant = self.budget.grant(1)  # leak: a done sequence continues past the refund
            if grant is None:
                break
            seq.computed += 1
            if self._hit_stop(seq):
                seq.phase = Phase.DONE
                continue
            stepped.append(seq.rid)
            self.budget.refund(grant)
        return stepped

    def decode_round_flat(self) -> list[str]:
        stepped: list[str] = []
        for seq in self.running:
            if seq.phase is not Phase.DECODE:
                continue
            grant = self.budget.grant(1)  # clean: refunded before the stop is checked
            if grant is None:
                break
            seq.computed += 1
            self.budget.refund(grant)
            if self._hit_stop(seq):
                seq.phase = Phase.DONE
                continue
            stepped.append(seq.rid)
        return stepped

    def _hit_stop(self, seq: Seq) -> bool:
        return seq.computed - seq.prompt_len > 4096

    def preempt_last(self) -> Seq | None:
        if not self.running:
            return None
        seq = self.running.pop()
        self._unseat(seq)
        seq.phase, seq.computed = Phase.WAITING, 0
        self.waiting.appendleft(seq)
        return seq

    def _unseat(self, seq: Seq) -> None:
        if seq.grant is not None:
            self.budget.refund(seq.grant)
            seq.grant = None
        if seq.row >= 0:
            self.slots.vacate(seq.row)
            seq.row = -1

    def reap(self) -> list[str]:
        done = [s for s in self.running if s.phase is Phase.DONE]
        self.running = [s for s in self.running if s.phase is not Phase.DONE]
        for seq in done:
            self._unseat(seq)
        return [s.rid for s in done]

    def dry_run(self, seqs: list[Seq]) -> int:
        fit = 0
        for seq in seqs:
            if self.budget.grant(seq.prompt_len) is None:  # leak: the grant is only compared and then dropped
                self.rejected.append(seq.rid)
                continue
            fit += 1
        return fit

    def dry_run_rows(self, seqs: list[Seq]) -> int:
        rows: dict[str, int] = {}
        for seq in seqs:
            row = self.slots.claim(seq.rid)  # clean: near miss, all rows are vacated after the count
            if row < 0:
                break
            rows[seq.rid] = row
        for row in rows.values():
            self.slots.vacate(row)
        return len(rows)

    def measure(self, rounds: int) -> float:
        begin = time.perf_counter()
        grant = self.budget.grant(self.chunk)  # leak: rebound each round, only the last one is refunded
        for _ in range(rounds):
            grant = self.budget.grant(self.chunk)  # leak: overwritten by the next round
        if grant is not None:
            self.budget.refund(grant)
        return time.perf_counter() - begin
