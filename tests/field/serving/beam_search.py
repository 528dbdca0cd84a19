"""Beam search on top of a paged cache with copy-on-write pages."""
from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass, field
from typing import List, Optional, Sequence, Tuple

import torch

LOG = logging.getLogger(__name__)


class RefPagePool:
    def __init__(self, n: int) -> None:
        self.refs = [0] * n
        self.avail = list(range(n))

    def new_page(self) -> int:
        page = self.avail.pop()
        self.refs[page] = 1
        return page

    def incref(self, page: int) -> int:
        self.refs[page] += 1
        return page

    def decref(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self.avail.append(page)


@dataclass(order=True)
class Beam:
    score: float
    tokens: List[int] = field(compare=False, default_factory=list)
    pages: List[int] = field(compare=False, default_factory=list)


class BeamSearcher:
    def __init__(self, pool: RefPagePool, width: int, page_size: int = 16) -> None:
        self.pool = pool
        self.width = width
        self.page_size = page_size
        self.done: List[Beam] = []

    def start(self, prompt: Sequence[int]) -> Beam:
        n = -(-len(prompt) // self.page_size)
        pages = [self.pool.new_page() for _ in range(n)]  # clean: owned by the beam that is returned
        return Beam(0.0, list(prompt), pages)

    def fork(self, parent: Beam, token: int, logp: float) -> Beam:
        pages = [self.pool.incref(p) for p in parent.pages]  # clean: owned by the child that is returned
        child = Beam(parent.score + logp, parent.tokens + [token], pages)
        if len(child.tokens) > len(pages) * self.page_size:
            child.pages.append(self.pool.new_page())  # clean: joins the pages of the child
        return child

    def drop(self, beam: Beam) -> None:
        for p in beam.pages:
            self.pool.decref(p)
        beam.pages = []

    def expand(self, beams: List[Beam], logps: torch.Tensor) -> List[Beam]:
        children: List[Beam] = []
        for beam, row in zip(beams, logps):
            top = torch.topk(row, self.width)
            for lp, tok in zip(top.values.tolist(), top.indices.tolist()):
                children.append(self.fork(beam, tok, lp))  # clean: near miss, those not kept are dropped below
        for beam in beams:
            self.drop(beam)
        best = heapq.nlargest(self.width, children)
        keep = {id(b) for b in best}
        for c in children:
            if id(c) not in keep:
                self.drop(c)
        return best

    def expand_fast(self, beams: List[Beam], logps: torch.Tensor) -> List[Beam]:
        children: List[Beam] = []
        for beam, row in zip(beams, logps):
            lp, tok = row.max(dim=-1)
            children.append(self.fork(beam, int(tok), float(lp)))  # leak: the children cut off by the slice are not dropped
        for beam in beams:
            self.drop(beam)
        children.sort(reverse=True)
        return children[: self.width]

    def greedy_step(self, beam: Beam, row: torch.Tensor, floor: float) -> Optional[Beam]:
        lp, tok = row.max(dim=-1)
        child = self.fork(beam, int(tok), float(lp))  # leak: below the floor the child is not dropped
        self.drop(beam)
        if child.score < floor:
            return None
        return child

    def try_step(self, beam: Beam, row: torch.Tensor, floor: float) -> Optional[Beam]:
        lp, tok = row.max(dim=-1)
        child = self.fork(beam, int(tok), float(lp))  # clean: near miss, exactly one of the two beams is dropped
        if child.score < floor:
            self.drop(child)
            return None
        self.drop(beam)
        return child

    def finish(self, beam: Beam) -> None:
        heapq.heappush(self.done, beam)
        while len(self.done) > self.width:
            self.drop(heapq.heappop(self.done))

    def search(self, prompt: Sequence[int], steps: int, vocab: int) -> List[int]:
        beams = [self.start(prompt)]  # clean: expand passes ownership on, the last beams are dropped
        for _ in range(steps):
            beams = self.expand(beams, torch.randn(len(beams), vocab).log_softmax(-1))  # clean: near miss, the rebound beams were dropped inside
        best = max(beams)
        tokens = best.tokens
        for b in beams:
            self.drop(b)
        return tokens

    def rescore(self, prompt: Sequence[int], rows: torch.Tensor) -> Tuple[float, List[int]]:
        beam = self.start(prompt)  # leak: the rebound name loses each parent without a drop
        for row in rows:
            lp, tok = row.max(dim=-1)
            beam = self.fork(beam, int(tok), float(lp))  # leak: the same, each child becomes a lost parent
        score, tokens = beam.score, beam.tokens
        self.drop(beam)
        return score, tokens

    def close(self) -> None:
        for b in self.done:
            self.drop(b)
        self.done.clear()
