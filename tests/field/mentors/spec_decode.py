"""Speculative decoding: draft state slots, tree scratch and verification tickets."""
from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Sequence

DraftFn = Callable[[list[int], int], list[int]]
VerifyFn = Callable[[list[int], list[int]], int]


class DraftSlots:
    def __init__(self, n: int) -> None:
        self._heap = list(range(n))
        self.owner: dict[int, str] = {}

    def acquire(self, rid: str) -> int:
        if not self._heap:
            return -1
        slot = heapq.heappop(self._heap)
        self.owner[slot] = rid
        return slot

    def release(self, slot: int) -> None:
        self.owner.pop(slot, None)
        heapq.heappush(self._heap, slot)


class TreeScratch:
    def __init__(self, n: int, width: int) -> None:
        self._free = [[0] * width for _ in range(n)]

    def lend(self) -> list[int] | None:
        return self._free.pop() if self._free else None

    def reclaim(self, scratch: list[int]) -> None:
        self._free.append(scratch)


class VerifyBudget:
    """Tokens that one verification step may hold."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def charge(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def refund(self, n: int) -> None:
        self.left += n


@dataclass
class SpecSeq:
    rid: str
    tokens: list[int]
    slot: int = -1
    scratch: list[int] | None = None
    proposal: list[int] = field(default_factory=list)
    misses: int = 0


class SpecWorker:
    def __init__(self, draft: DraftFn, verify: VerifyFn, slots: int, budget: int, k: int = 4) -> None:
        self.draft = draft
        self.verify = verify
        self.k = k
        self.slots = DraftSlots(slots)
        self.scratch = TreeScratch(slots, 64)
        self.budget = VerifyBudget(budget)
        self.seqs: OrderedDict[str, SpecSeq] = OrderedDict()

    def add(self, seq: SpecSeq) -> None:
        self.seqs[seq.rid] = seq

    def enable(self, rid: str) -> bool:
        seq = self.seqs[rid]
        if seq.slot >= 0:
            return True
        slot = self.slots.acquire(rid)  # clean: near miss, released when there is no scratch, else the sequence's
        if slot < 0:
            return False
        scratch = self.scratch.lend()  # leak: disable, which is the only way back, forgets it
        if scratch is None:
            self.slots.release(slot)
            return False
        seq.slot, seq.scratch = slot, scratch
        return True

    def disable(self, seq: SpecSeq) -> None:
        if seq.slot >= 0:
            self.slots.release(seq.slot)
            seq.slot = -1
        seq.scratch = None
        self.budget.refund(len(seq.proposal))
        seq.proposal = []

    def propose(self, seq: SpecSeq) -> int:
        n = min(self.k, 64 - len(seq.tokens) % 64)
        if seq.proposal or not self.budget.charge(n):  # leak: the draft may be shorter than n, verification refunds only its length
            return 0
        seq.proposal = self.draft(seq.tokens, n)
        return len(seq.proposal)

    def propose_exact(self, seq: SpecSeq) -> int:
        if seq.proposal or not self.budget.charge(self.k):  # clean: near miss, the part not used is refunded at once, the rest by finish_verify
            return 0
        seq.proposal = self.draft(seq.tokens, self.k)[: self.k]
        self.budget.refund(self.k - len(seq.proposal))
        return len(seq.proposal)

    def finish_verify(self, seq: SpecSeq) -> int:
        accepted = self.verify(seq.tokens, seq.proposal)
        seq.tokens.extend(seq.proposal[:accepted])
        seq.misses = 0 if accepted else seq.misses + 1
        self.budget.refund(len(seq.proposal))
        seq.proposal = []
        return accepted

    def step(self) -> int:
        total = 0
        for seq in self.seqs.values():
            if seq.slot < 0:
                continue
            if self.propose_exact(seq):  # clean: the proposal's charge is refunded by finish_verify in the same round
                total += self.finish_verify(seq)
            if seq.misses > 8:
                self.disable(seq)
        return total

    def ngram_probe(self, seq: SpecSeq, n: int) -> list[int]:
        window = self.scratch.lend()  # leak: the return in the loop leaves the scratch behind
        if window is None:
            return []
        tail = seq.tokens[-n:]
        for i in range(len(seq.tokens) - n - 1, -1, -1):
            window[:n] = seq.tokens[i : i + n]
            if window[:n] == tail:
                return seq.tokens[i + n : i + n + self.k]
        self.scratch.reclaim(window)
        return []

    def score_branches(self, seq: SpecSeq, branches: Sequence[Sequence[int]]) -> list[float]:
        scores: list[float] = []
        for br in branches:
            buf = self.scratch.lend()  # clean: near miss, reclaimed before `continue` and at the end of the round
            if buf is None:
                break
            if len(br) > len(buf):
                self.scratch.reclaim(buf)
                continue
            buf[: len(br)] = br
            scores.append(sum(1.0 for t in buf[: len(br)] if t in seq.tokens) / max(len(br), 1))
            self.scratch.reclaim(buf)
        return scores

    def try_tree(self, seq: SpecSeq, width: int, depth: int) -> int:
        need = width * depth
        if not self.budget.charge(need):  # clean: near miss, refunded in finally
            return 0
        try:
            buf = self.scratch.lend()  # clean: reclaimed after the best branch is known
            if buf is None:
                return 0
            best = 0
            for _ in range(width):
                branch = self.draft(seq.tokens, depth)
                best = max(best, self.verify(seq.tokens, branch))
                if best == depth:
                    break
            self.scratch.reclaim(buf)
            return best
        finally:
            self.budget.refund(need)

    def migrate(self, src: str, dst: str) -> bool:
        a, b = self.seqs[src], self.seqs[dst]
        if a.slot < 0:
            return False
        slot = self.slots.acquire(dst)  # leak: b may have a slot already, which this one replaces
        if slot < 0:
            return False
        b.slot = slot
        b.proposal, a.proposal = a.proposal, b.proposal
        return True

    def sample_victim(self) -> SpecSeq | None:
        live = [s for s in self.seqs.values() if s.slot >= 0]
        return random.choice(live) if live else None

    def finish(self, rid: str) -> None:
        self.disable(self.seqs.pop(rid))
