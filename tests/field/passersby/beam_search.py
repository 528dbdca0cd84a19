"""Beam search over paged KV cache, copy-on-write pages."""
from __future__ import annotations

import copy
import heapq
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Sequence, Tuple

ScoreFn = Callable[[Sequence[int]], List[Tuple[int, float]]]


class CowPages:
    """Reference counts per page."""

    def __init__(self, n: int, page: int = 16) -> None:
        self.page = page
        self.refs: Dict[int, int] = {}
        self.unused = set(range(n))

    def new_page(self) -> int:
        p = self.unused.pop()  # clean: gets its first reference and is returned
        self.refs[p] = 1
        return p

    def share(self, pages: Sequence[int]) -> List[int]:
        for p in pages:
            self.refs[p] += 1
        return list(pages)

    def drop(self, pages: Sequence[int]) -> None:
        for p in pages:
            self.refs[p] -= 1
            if self.refs[p] == 0:
                del self.refs[p]
                self.unused.add(p)

    def is_shared(self, p: int) -> bool:
        return self.refs.get(p, 0) > 1


@dataclass(order=True)
class Beam:
    neg_score: float
    tokens: List[int] = field(compare=False)
    pages: List[int] = field(compare=False, default_factory=list)
    done: bool = field(compare=False, default=False)


class BeamSearcher:
    def __init__(self, pages: CowPages, width: int, eos: int, score: ScoreFn) -> None:
        self.pages = pages
        self.width = width
        self.eos = eos
        self.score = score

    def _child(self, b: Beam, token: int, lp: float) -> Beam:
        shared = self.pages.share(b.pages)  # clean: near miss, split and extended below, all of it goes into the child
        if shared and len(b.tokens) % self.pages.page and self.pages.is_shared(shared[-1]):
            last = shared.pop()
            self.pages.drop([last])
            shared.append(self.pages.new_page())  # clean: in the child's table
        elif len(b.tokens) % self.pages.page == 0:
            shared.append(self.pages.new_page())  # clean: in the child's table
        return Beam(b.neg_score - lp, b.tokens + [token], shared)

    def search(self, prompt: List[int], steps: int) -> List[int]:
        beams = [Beam(0.0, list(prompt), [self.pages.new_page()])]  # clean: the beams are dropped when replaced or at the end
        for _ in range(steps):
            children: List[Beam] = []
            for b in beams:
                for tok, lp in self.score(b.tokens):
                    children.append(self._child(b, tok, lp))  # clean: near miss, the losers are dropped after pruning
            if not children:
                break
            best = heapq.nsmallest(self.width, children)
            for c in children:
                if not any(c is k for k in best):
                    self.pages.drop(c.pages)
            for b in beams:
                self.pages.drop(b.pages)
            beams = best
        answer = min(beams).tokens
        for b in beams:
            self.pages.drop(b.pages)
        return answer

    def search_lazy(self, prompt: List[int], steps: int) -> List[int]:
        beams = [Beam(0.0, list(prompt), [self.pages.new_page()])]  # clean: dropped with the other beams when replaced
        for _ in range(steps):
            children = [self._child(b, t, lp) for b in beams for t, lp in self.score(b.tokens)]  # leak: the children that are cut off by the width keep their pages
            for b in beams:
                self.pages.drop(b.pages)
            beams = sorted(children)[: self.width]
            if not beams:
                return list(prompt)
        answer = beams[0].tokens
        for b in beams:
            self.pages.drop(b.pages)
        return answer

    def greedy(self, prompt: List[int], steps: int) -> List[int]:
        beam = Beam(0.0, list(prompt), [self.pages.new_page()])  # leak: at eos the tokens are returned without dropping the beam's pages
        for _ in range(steps):
            cand = self.score(beam.tokens)
            tok, lp = max(cand, key=lambda c: c[1])
            if tok == self.eos:
                return beam.tokens
            beam.tokens.append(tok)
            beam.neg_score -= lp
            if len(beam.tokens) % self.pages.page == 0:
                beam.pages.append(self.pages.new_page())  # leak: lost with the beam's other pages at eos
        self.pages.drop(beam.pages)
        return beam.tokens

    def greedy_eos(self, prompt: List[int], steps: int) -> List[int]:
        beam = Beam(0.0, list(prompt), [self.pages.new_page()])  # clean: near miss, eos breaks to the common exit
        for _ in range(steps):
            tok, lp = max(self.score(beam.tokens), key=lambda c: c[1])
            if tok == self.eos:
                break
            beam.tokens.append(tok)
            if len(beam.tokens) % self.pages.page == 0:
                beam.pages.append(self.pages.new_page())  # clean: dropped with the beam
        self.pages.drop(beam.pages)
        return beam.tokens

    def snapshot(self, b: Beam) -> Beam:
        dup = copy.copy(b)
        dup.tokens = list(b.tokens)
        dup.pages = self.pages.share(b.pages)  # clean: belongs to the snapshot that is returned
        return dup

    def rerank(self, b: Beam, fns: List[ScoreFn]) -> Optional[float]:
        snap = self.snapshot(b)  # leak: a scorer without candidates returns None and the shared pages stay counted
        total = 0.0
        for fn in fns:
            cand = fn(snap.tokens)
            if not cand:
                return None
            total += max(lp for _, lp in cand)
        self.pages.drop(snap.pages)
        return total

    def lookahead(self, b: Beam, depth: int) -> float:
        snap = self.snapshot(b)  # clean: dropped in finally
        try:
            for _ in range(depth):
                cand = self.score(snap.tokens)
                if not cand:
                    return snap.neg_score
                tok, lp = cand[0]
                snap.tokens.append(tok)
                snap.neg_score -= lp
            return snap.neg_score
        finally:
            self.pages.drop(snap.pages)
