"""Beam search over shared cache slots: forked beams share a slot by reference count."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Callable

import torch


class SlotTable:
    def __init__(self, n: int) -> None:
        self.refs = [0] * n

    def new_slot(self) -> int:
        for i, r in enumerate(self.refs):
            if r == 0:
                self.refs[i] = 1
                return i
        raise RuntimeError("no slot left")

    def inc_ref(self, slot: int) -> None:
        self.refs[slot] += 1

    def dec_ref(self, slot: int) -> None:
        if self.refs[slot] == 0:
            raise ValueError("slot already free")
        self.refs[slot] -= 1


@dataclass
class Beam:
    tokens: list[int]
    score: float
    slot: int


class BeamSearcher:
    def __init__(self, table: SlotTable, step: Callable[[Beam], torch.Tensor], width: int, eos: int) -> None:
        self.table = table
        self.step = step
        self.width = width
        self.eos = eos
        self.beams: list[Beam] = []
        self.finished: list[Beam] = []

    def start(self, prompt: list[int]) -> None:
        self.stop()
        slot = self.table.new_slot()  # clean: held by the first beam, stop drops every beam
        self.beams = [Beam(prompt, 0.0, slot)]

    def stop(self) -> None:
        for b in self.beams + self.finished:
            self.table.dec_ref(b.slot)
        self.beams, self.finished = [], []

    def fork(self, beam: Beam, token: int, logp: float) -> Beam:
        self.table.inc_ref(beam.slot)  # clean: the new beam carries the reference to the caller
        return replace(beam, tokens=beam.tokens + [token], score=beam.score + logp)

    def expand(self) -> None:
        cands: list[Beam] = []
        for b in self.beams:
            logp = self.step(b).log_softmax(-1)
            top = logp.topk(self.width)
            for lp, tok in zip(top.values.tolist(), top.indices.tolist()):
                cands.append(self.fork(b, tok, lp))  # clean: near miss, losers and parents are dropped below, winners become beams
        for b in self.beams:
            self.table.dec_ref(b.slot)
        cands.sort(key=lambda c: -c.score)
        for loser in cands[self.width :]:
            self.table.dec_ref(loser.slot)
        self.beams = cands[: self.width]

    def expand_pruned(self, gap: float) -> None:
        cands: list[Beam] = []
        best = -math.inf
        for b in self.beams:
            logp = self.step(b).log_softmax(-1)
            tok = int(logp.argmax())
            child = self.fork(b, tok, float(logp[tok]))  # leak: children below the gap are not kept and not dropped
            best = max(best, child.score)
            if child.score < best - gap:
                continue
            cands.append(child)
        for b in self.beams:
            self.table.dec_ref(b.slot)
        self.beams = cands

    def harvest(self) -> None:
        alive = []
        for b in self.beams:
            (self.finished if b.tokens[-1] == self.eos else alive).append(b)
        self.beams = alive

    def privatise(self, beam: Beam) -> None:
        if self.table.refs[beam.slot] == 1:
            return
        fresh = self.table.new_slot()  # clean: near miss, the old reference is dropped before the beam takes the new slot
        self.table.dec_ref(beam.slot)
        beam.slot = fresh

    def privatise_all(self, copy: Callable[[int, int], bool]) -> int:
        n = 0
        for b in self.beams:
            fresh = self.table.new_slot()  # leak: a failed copy breaks out with the fresh slot
            if not copy(b.slot, fresh):
                break
            self.table.dec_ref(b.slot)
            b.slot = fresh
            n += 1
        return n

    def rescore(self, beam: Beam, fn: Callable[[Beam], float | None]) -> float:
        self.table.inc_ref(beam.slot)  # leak: None score returns with the additional reference
        s = fn(beam)
        if s is None:
            return beam.score
        self.table.dec_ref(beam.slot)
        return s

    def rescore_all(self, fn: Callable[[Beam], float | None]) -> list[float]:
        out = []
        for b in self.beams:
            self.table.inc_ref(b.slot)  # clean: near miss, dropped before the None test
            s = fn(b)
            self.table.dec_ref(b.slot)
            if s is None:
                continue
            out.append(s)
        return out

    def lookahead(self, beam: Beam, depth: int) -> float:
        cur = self.fork(beam, self.eos, 0.0)  # clean: near miss, each round drops the one it replaces, the last is dropped after the loop
        for _ in range(depth):
            logp = self.step(cur).log_softmax(-1)
            tok = int(logp.argmax())
            nxt = self.fork(cur, tok, float(logp[tok]))  # clean: near miss, becomes cur
            self.table.dec_ref(cur.slot)
            cur = nxt
        score = cur.score
        self.table.dec_ref(cur.slot)
        return score

    def lookahead_fast(self, beam: Beam, depth: int) -> float:
        cur = self.fork(beam, self.eos, 0.0)  # leak: rebound by the first round and never dropped
        for _ in range(depth):
            cur = self.fork(cur, self.eos, -1.0)  # leak: all but the last fork are rebound away
        self.table.dec_ref(cur.slot)
        return cur.score

    def best_score_after(self, tok: int) -> float:
        return max(self.fork(b, tok, -1.0).score for b in self.beams)  # leak: forks made for their score only


def diverse_groups(table: SlotTable, groups: int, prompt: list[int]) -> dict[int, Beam]:
    root = table.new_slot()  # clean: near miss, root reference dropped once each group holds its own
    out: dict[int, Beam] = {}
    for g in range(groups):
        table.inc_ref(root)  # clean: carried by the beams given to the caller
        out[g] = Beam(list(prompt), -0.1 * g, root)
    table.dec_ref(root)
    return out


def run_groups(table: SlotTable, prompt: list[int], groups: int, score: Callable[[Beam], float]) -> float:
    beams = diverse_groups(table, groups, prompt)  # leak: group 0 is removed from the dict before the dropping loop
    base = score(beams.pop(0))
    best = max((score(b) for b in beams.values()), default=base)
    for b in beams.values():
        table.dec_ref(b.slot)
    return max(best, base)
