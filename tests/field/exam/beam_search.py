from __future__ import annotations

import copy
import heapq
import math
from typing import Callable

import torch


class RefBlocks:
    """Copy-on-write blocks shared by beams."""

    def __init__(self, n: int):
        self.rc = [0] * n
        self.q = list(range(n))

    def new(self) -> int:
        b = self.q.pop()  # clean: goes to the caller with one reference
        self.rc[b] = 1
        return b

    def share(self, b: int) -> int:
        self.rc[b] += 1
        return b

    def unref(self, b: int) -> None:
        self.rc[b] -= 1
        if self.rc[b] == 0:
            self.q.append(b)


class Hyp:
    __slots__ = "toks", "score", "blocks"

    def __init__(self, toks: list[int], score: float, blocks: list[int]):
        self.toks = toks
        self.score = score
        self.blocks = blocks

    def __lt__(self, other: Hyp) -> bool:
        return self.score < other.score


def fork(rb: RefBlocks, h: Hyp, tok: int, lp: float) -> Hyp:
    return Hyp(h.toks + [tok], h.score + lp, [rb.share(b) for b in h.blocks])  # clean: owned by the returned hypothesis


def drop(rb: RefBlocks, h: Hyp) -> None:
    for b in h.blocks:
        rb.unref(b)
    h.blocks = []


def start(rb: RefBlocks, prompt: list[int], page: int) -> Hyp:
    return Hyp(list(prompt), 0.0, [rb.new() for _ in range(0, len(prompt), page)])  # clean: owned by the returned hypothesis


def expand(rb: RefBlocks, h: Hyp, logp: torch.Tensor, k: int) -> list[Hyp]:
    vals, idx = logp.topk(k)
    return [fork(rb, h, int(i), float(v)) for v, i in zip(vals, idx)]  # clean: the list goes to the caller


Step = Callable[[Hyp], torch.Tensor]


def beam(rb: RefBlocks, prompt: list[int], step: Step, k: int, n: int) -> Hyp:
    beams = [start(rb, prompt, 4)]  # clean: dropped in the first turn, all but the winner later
    for _ in range(n):
        cand: list[Hyp] = []
        for h in beams:
            cand += expand(rb, h, step(h), k)  # clean: near miss, losers are dropped, winners become beams
            drop(rb, h)
        cand.sort(reverse=True)
        for h in cand[k:]:
            drop(rb, h)
        beams = cand[:k]
    best = beams[0]
    for h in beams[1:]:
        drop(rb, h)
    return best


def beam_heap(rb: RefBlocks, prompt: list[int], step: Step, k: int, n: int) -> Hyp:
    beams = [start(rb, prompt, 4)]  # clean: dropped after its expansion
    for _ in range(n):
        cand: list[Hyp] = []
        for h in beams:
            cand.extend(expand(rb, h, step(h), k))  # leak: nlargest keeps k hypotheses, the others are never dropped
            drop(rb, h)
        beams = heapq.nlargest(k, cand)
    for h in beams[1:]:
        drop(rb, h)
    return beams[0]


def generate(rb: RefBlocks, prompt: list[int], step: Step, k: int, n: int) -> list[int]:
    h = beam(rb, prompt, step, k, n)  # clean: dropped after the tokens are copied
    toks = copy.copy(h.toks)
    drop(rb, h)
    return toks


def score_of(rb: RefBlocks, prompt: list[int], step: Step, k: int, n: int) -> float:
    return beam(rb, prompt, step, k, n).score  # leak: only the score of the hypothesis is used


def greedy(rb: RefBlocks, prompt: list[int], step: Step, n: int, eos: int) -> list[int]:
    h = start(rb, prompt, 4)  # leak: return at eos keeps the blocks
    for _ in range(n):
        t = int(step(h).argmax())
        if t == eos:
            return h.toks
        h.toks.append(t)
    drop(rb, h)
    return h.toks


def argmax_decode(rb: RefBlocks, prompt: list[int], step: Step, n: int, eos: int) -> list[int]:
    h = start(rb, prompt, 4)  # clean: near miss, break reaches drop
    for _ in range(n):
        t = int(step(h).argmax())
        if t == eos:
            break
        h.toks.append(t)
        if len(h.toks) % 4 == 1:
            h.blocks.append(rb.new())  # clean: drop releases all blocks of h
    drop(rb, h)
    return h.toks


def sample(rb: RefBlocks, prompt: list[int], step: Step, n: int) -> list[int]:
    h = start(rb, prompt, 4)  # leak: h is rebound to its fork, the parent is never dropped
    for _ in range(n):
        p = step(h).exp()
        t = int(torch.multinomial(p, 1))
        h = fork(rb, h, t, math.log(float(p[t])))  # leak: the next fork rebinds h, only the last one is dropped
    toks = h.toks
    drop(rb, h)
    return toks


def ancestral(rb: RefBlocks, prompt: list[int], step: Step, n: int) -> list[int]:
    h = start(rb, prompt, 4)  # clean: near miss, dropped as prev
    for _ in range(n):
        p = step(h).exp()
        t = int(torch.multinomial(p, 1))
        prev, h = h, fork(rb, h, t, math.log(float(p[t])))  # clean: near miss, prev is dropped each turn, h at the end
        drop(rb, prev)
    toks = h.toks
    drop(rb, h)
    return toks


def rescore(rb: RefBlocks, hyps: list[Hyp], step: Step, floor: float) -> list[Hyp]:
    out = []
    for h in hyps:
        f = fork(rb, h, 0, float(step(h).max()))  # leak: hypotheses below the floor are not appended and not dropped
        if f.score >= floor:
            out.append(f)
    return out


def cow(rb: RefBlocks, h: Hyp) -> None:
    last = h.blocks[-1]
    if rb.rc[last] > 1:
        fresh = rb.new()  # clean: replaces the shared block, which is unreferenced
        h.blocks[-1] = fresh
        rb.unref(last)
