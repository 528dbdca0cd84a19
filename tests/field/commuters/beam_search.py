"""Beam search over paged KV: hypotheses share pages copy-on-write."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable, Optional


@dataclass
class Hypothesis:
    tokens: list[int]
    score: float
    pages: list[int] = field(default_factory=list)

    @property
    def normalized(self) -> float:
        return self.score / max(len(self.tokens), 1)


class PagePool:
    """Counts per page; a page of count zero is available."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._count = [0] * pages
        self._zero = list(range(pages - 1, -1, -1))

    def mint(self) -> Optional[int]:
        if not self._zero:
            return None
        page = self._zero.pop()  # clean: the page number is returned
        self._count[page] = 1
        return page

    def retain(self, pages: list[int]) -> list[int]:
        for p in pages:
            self._count[p] += 1
        return list(pages)

    def drop(self, pages: list[int]) -> None:
        for p in pages:
            self._count[p] -= 1
            if self._count[p] == 0:
                self._zero.append(p)
        pages.clear()


Expand = Callable[[list[int]], list[tuple[int, float]]]


class BeamSearcher:
    def __init__(self, pool: PagePool, expand: Expand, width: int, eos: int) -> None:
        self.pool = pool
        self.expand = expand
        self.width = width
        self.eos = eos
        self.finished: list[Hypothesis] = []

    def seed(self, prompt: list[int]) -> Optional[Hypothesis]:
        hyp = Hypothesis(list(prompt), 0.0)
        need = math.ceil(len(prompt) / self.pool.page_size)
        for _ in range(need):
            page = self.pool.mint()  # clean: near miss, when short the pages minted so far are dropped
            if page is None:
                self.pool.drop(hyp.pages)
                return None
            hyp.pages.append(page)
        return hyp

    def seed_unchecked(self, prompt: list[int]) -> Optional[Hypothesis]:
        pages: list[int] = []
        while len(pages) * self.pool.page_size < len(prompt):
            page = self.pool.mint()  # leak: pages minted earlier in the loop die with the local list
            if page is None:
                return None
            pages.append(page)
        return Hypothesis(list(prompt), 0.0, pages)

    def _child(self, parent: Hypothesis, token: int, logp: float) -> Optional[Hypothesis]:
        pages = self.pool.retain(parent.pages)  # leak: no fresh page for the tail and the shared ones stay retained
        if len(parent.tokens) % self.pool.page_size == 0:
            tail = self.pool.mint()  # clean: appended to the child's pages
            if tail is None:
                return None
            pages.append(tail)
        return Hypothesis(parent.tokens + [token], parent.score + logp, pages)

    def step(self, beams: list[Hypothesis]) -> list[Hypothesis]:
        children: list[Hypothesis] = []
        for beam in beams:
            for token, logp in self.expand(beam.tokens)[: self.width]:
                child = self._child(beam, token, logp)  # clean: near miss, those outside the width are dropped below
                if child is None:
                    continue
                if token == self.eos:
                    self.finished.append(child)
                else:
                    children.append(child)
            self.pool.drop(beam.pages)
        children.sort(key=lambda h: -h.normalized)
        for loser in children[self.width:]:
            self.pool.drop(loser.pages)
        return children[: self.width]

    def greedy_step(self, hyp: Hypothesis) -> Optional[Hypothesis]:
        best: Optional[Hypothesis] = None
        for token, logp in self.expand(hyp.tokens):
            child = self._child(hyp, token, logp)  # leak: a worse child is passed over with its pages
            if child is None:
                break
            if best is None or child.score > best.score:
                if best is not None:
                    self.pool.drop(best.pages)
                best = child
        self.pool.drop(hyp.pages)
        return best

    def harvest(self) -> Optional[list[int]]:
        if not self.finished:
            return None
        self.finished.sort(key=lambda h: -h.normalized)
        tokens = list(self.finished[0].tokens)
        for hyp in self.finished:
            self.pool.drop(hyp.pages)
        self.finished.clear()
        return tokens


def generate(searcher: BeamSearcher, prompt: list[int], max_len: int) -> Optional[list[int]]:
    first = searcher.seed(prompt)  # clean: step drops parents, the rest are dropped after the loop
    if first is None:
        return None
    beams = [first]
    for _ in range(max_len):
        if not beams:
            break
        beams = searcher.step(beams)  # clean: near miss, rebound every step but step took over the old ones
    for beam in beams:
        searcher.pool.drop(beam.pages)
    return searcher.harvest()


def score_only(searcher: BeamSearcher, prompt: list[int]) -> float:
    hyp = searcher.seed(prompt)  # leak: an eos right after the prompt returns without dropping the pages
    if hyp is None:
        return -math.inf
    token, logp = searcher.expand(hyp.tokens)[0]
    if token == searcher.eos:
        return logp
    searcher.pool.drop(hyp.pages)
    return hyp.score + logp


def snapshot(pool: PagePool, hyp: Hypothesis) -> Hypothesis:
    return Hypothesis(list(hyp.tokens), hyp.score, pool.retain(hyp.pages))  # clean: retained for the copy the caller gets
