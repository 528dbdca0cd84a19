"""Speculative decoding: draft proposals live in lookahead slots until verification."""
from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class SlotRun:
    start: int
    length: int
    tokens: list[int] = field(default_factory=list)


class LookaheadSlots:
    """Contiguous runs of KV slots for tokens that may be rejected."""

    def __init__(self, total: int, width: int):
        self.width = width
        self._idle = [SlotRun(i * width, width) for i in range(total // width)]
        self.outstanding = 0

    def reserve(self) -> SlotRun | None:
        if not self._idle:
            return None
        run = self._idle.pop()
        run.tokens.clear()
        self.outstanding += 1
        return run

    def relinquish(self, run: SlotRun) -> None:
        self.outstanding -= 1
        self._idle.append(run)

    def relinquish_all(self, runs: list[SlotRun]) -> None:
        for run in runs:
            self.relinquish(run)


class DraftModel(Protocol):
    def next_token(self, context: list[int]) -> int: ...


class TargetModel(Protocol):
    def score(self, context: list[int], proposed: list[int]) -> list[float]: ...


@dataclass
class SpecRequest:
    rid: int
    context: list[int]
    gamma: int = 4
    pending: SlotRun | None = None
    accepted: int = 0
    disabled: bool = False


class Proposer:
    def __init__(self, slots: LookaheadSlots, draft: DraftModel):
        self.slots = slots
        self.draft = draft
        self.misses = 0

    def propose(self, req: SpecRequest) -> SlotRun | None:
        run = self.slots.reserve()  # clean: None-checked, handed to the caller
        if run is None:
            self.misses += 1
            return None
        ctx = list(req.context)
        for _ in range(min(req.gamma, run.length)):
            tok = self.draft.next_token(ctx)
            run.tokens.append(tok)
            ctx.append(tok)
        return run

    def propose_ngram(self, req: SpecRequest, n: int) -> SlotRun | None:
        run = self.slots.reserve()  # leak: no n-gram match returns None with the run taken
        if run is None:
            return None
        gram = req.context[-n:]
        for i in range(len(req.context) - 2 * n, -1, -1):
            if req.context[i:i + n] == gram:
                run.tokens.extend(req.context[i + n:i + n + run.length])
                return run
        return None

    def propose_tree(self, req: SpecRequest, branches: int) -> list[SlotRun]:
        runs: list[SlotRun] = []
        for _ in range(branches):
            run = self.slots.reserve()  # clean: near miss, every run goes into the returned list
            if run is None:
                break
            run.tokens.append(self.draft.next_token(req.context))
            runs.append(run)
        return runs

    def propose_pair(self, req: SpecRequest) -> tuple[SlotRun, SlotRun] | None:
        left = self.slots.reserve()  # leak: lost when the second reservation comes back empty
        if left is None:
            return None
        right = self.slots.reserve()  # clean: returned with the first
        if right is None:
            self.misses += 1
            return None
        left.tokens.append(self.draft.next_token(req.context))
        right.tokens.append(self.draft.next_token(req.context[:-1]))
        return left, right

    def propose_pair_safe(self, req: SpecRequest) -> tuple[SlotRun, SlotRun] | None:
        left = self.slots.reserve()  # clean: rolled back when the second is missing
        right = self.slots.reserve()  # clean: rolled back when the first is missing
        if left is None or right is None:
            for run in (left, right):
                if run is not None:
                    self.slots.relinquish(run)
            return None
        left.tokens.append(self.draft.next_token(req.context))
        right.tokens.append(self.draft.next_token(req.context[:-1]))
        return left, right


class SpecWorker:
    def __init__(self, proposer: Proposer, target: TargetModel, slots: LookaheadSlots):
        self.proposer = proposer
        self.target = target
        self.slots = slots
        self.inflight: dict[int, SlotRun] = {}
        self.by_length: dict[int, int] = defaultdict(int)

    def _verify(self, req: SpecRequest, run: SlotRun) -> int:
        probs = self.target.score(req.context, run.tokens)
        good = 0
        for tok, p in zip(run.tokens, probs):
            if random.random() > p:
                break
            req.context.append(tok)
            good += 1
        req.accepted += good
        return good

    def step(self, req: SpecRequest) -> int:
        if req.disabled:
            return 0
        run = self.proposer.propose(req)  # clean: relinquished after verification
        if run is None:
            return 0
        good = self._verify(req, run)
        self.by_length[good] += 1
        self.slots.relinquish(run)
        return good

    def step_adaptive(self, req: SpecRequest, min_rate: float) -> int:
        run = self.proposer.propose(req)  # leak: the branch which turns speculation off keeps the run
        if run is None:
            return 0
        good = self._verify(req, run)
        if good / max(1, len(run.tokens)) < min_rate:
            req.disabled = True
            return good
        self.slots.relinquish(run)
        return good

    def launch(self, req: SpecRequest) -> bool:
        if req.rid in self.inflight:
            return False
        run = self.proposer.propose(req)  # clean: near miss, parked in inflight until collect or cancel
        if run is None:
            return False
        self.inflight[req.rid] = run
        return True

    def collect(self, req: SpecRequest) -> int:
        run = self.inflight.pop(req.rid, None)
        if run is None:
            return 0
        good = self._verify(req, run)
        self.slots.relinquish(run)
        return good

    def cancel(self, rid: int) -> None:
        run = self.inflight.pop(rid, None)
        if run is not None:
            self.slots.relinquish(run)

    def step_tree(self, req: SpecRequest, branches: int) -> int:
        runs = self.proposer.propose_tree(req, branches)  # leak: the losing branches are never relinquished
        if not runs:
            return 0
        best = max(runs, key=lambda r: self.target.score(req.context, r.tokens)[0])
        good = self._verify(req, best)
        self.slots.relinquish(best)
        return good

    def step_tree_greedy(self, req: SpecRequest, branches: int) -> int:
        runs = self.proposer.propose_tree(req, branches)  # clean: all of them go back together
        good = 0
        if runs:
            best = max(runs, key=lambda r: self.target.score(req.context, r.tokens)[0])
            good = self._verify(req, best)
        self.slots.relinquish_all(runs)
        return good

    def step_pair(self, req: SpecRequest) -> int:
        pair = self.proposer.propose_pair_safe(req)  # leak: the right run is lost if the left one is accepted
        if pair is None:
            return 0
        left, right = pair
        good = self._verify(req, left)
        self.slots.relinquish(left)
        if good == 0:
            good = self._verify(req, right)
            self.slots.relinquish(right)
        return good

    def retry_ngram(self, req: SpecRequest) -> int:
        run = None
        for n in (4, 3, 2):
            run = self.proposer.propose_ngram(req, n)  # leak: a short match is overwritten by the next round
            if run is not None and len(run.tokens) >= req.gamma:
                break
        if run is None:
            return 0
        good = self._verify(req, run)
        self.slots.relinquish(run)
        return good

    def retry_ngram_first(self, req: SpecRequest) -> int:
        for n in (4, 3, 2):
            run = self.proposer.propose_ngram(req, n)  # clean: near miss, short matches go back first
            if run is None:
                continue
            if len(run.tokens) < req.gamma:
                self.slots.relinquish(run)
                continue
            good = self._verify(req, run)
            self.slots.relinquish(run)
            return good
        return 0

    def drain(self) -> None:
        for run in self.inflight.values():
            self.slots.relinquish(run)
        self.inflight.clear()
