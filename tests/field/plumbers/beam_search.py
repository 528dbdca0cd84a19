"""Beam search over shared KV pages."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple


class OutOfPages(Exception):
    pass


class PageHeap:
    """Pages with a use count; a page is reusable when the count is zero."""

    def __init__(self, n: int) -> None:
        self._spare = list(range(n))
        self.uses = [0] * n

    def new_page(self) -> int:
        if not self._spare:
            raise OutOfPages()
        page = self._spare.pop()
        self.uses[page] = 1
        return page

    def ref(self, page: int) -> None:
        self.uses[page] += 1

    def unref(self, page: int) -> None:
        self.uses[page] -= 1
        if not self.uses[page]:
            self._spare.append(page)


@dataclass
class Beam:
    tokens: List[int]
    score: float
    pages: List[int] = field(default_factory=list)
    ended: bool = False


class BeamSearcher:
    def __init__(self, heap: PageHeap, width: int, page_size: int, eos: int) -> None:
        self.heap = heap
        self.width = width
        self.page_size = page_size
        self.eos = eos
        self.groups: Dict[str, List[Beam]] = {}
        self.best: Dict[str, Beam] = {}

    def _unref_all(self, pages: List[int]) -> None:
        for page in pages:
            self.heap.unref(page)

    def _prefill(self, tokens: List[int]) -> List[int]:
        pages: List[int] = []
        try:
            for _ in range(0, len(tokens), self.page_size):
                pages.append(self.heap.new_page())  # clean: near miss, unreffed by the handler before it raises again
        except OutOfPages:
            self._unref_all(pages)
            raise
        return pages

    def start(self, rid: str, tokens: List[int]) -> bool:
        try:
            pages = self._prefill(tokens)  # clean: moved to the beam of the group
        except OutOfPages:
            return False
        self.groups[rid] = [Beam(list(tokens), 0.0, pages)]
        return True

    def start_batch(self, prompts: Dict[str, List[int]]) -> bool:
        ready: Dict[str, Beam] = {}
        try:
            for rid, tokens in prompts.items():
                ready[rid] = Beam(list(tokens), 0.0, self._prefill(tokens))  # leak: a later prompt runs out and the beams made before are dropped
        except OutOfPages:
            return False
        for rid, beam in ready.items():
            self.groups[rid] = [beam]
        return True

    def _child(self, parent: Beam, token: int, logp: float) -> Beam:
        for page in parent.pages:
            self.heap.ref(page)  # clean: the child holds the counts
        return Beam(parent.tokens + [token], parent.score + logp, list(parent.pages))

    def _write_slot(self, beam: Beam) -> None:
        """Makes the last page of a beam writable."""
        if len(beam.tokens) % self.page_size == 1 or not beam.pages:
            beam.pages.append(self.heap.new_page())  # clean: kept by the beam
            return
        last = beam.pages[-1]
        if self.heap.uses[last] > 1:
            beam.pages[-1] = self.heap.new_page()  # clean: near miss, the page it displaces is unreffed
            self.heap.unref(last)

    def expand(self, rid: str, cands: List[List[Tuple[int, float]]]) -> None:
        beams = self.groups[rid]
        children: List[Beam] = []
        for beam, options in zip(beams, cands):
            for token, logp in options:
                children.append(self._child(beam, token, logp))  # leak: candidates past the width are cut off without unref
        children.sort(key=lambda b: -b.score)
        children = children[: self.width]
        for beam in beams:
            self._unref_all(beam.pages)
        for beam in children:
            self._write_slot(beam)
        self.groups[rid] = children

    def expand_pruned(self, rid: str, cands: List[List[Tuple[int, float]]]) -> None:
        beams = self.groups[rid]
        scored = [(beam, t, lp) for beam, opts in zip(beams, cands) for t, lp in opts]
        scored.sort(key=lambda x: -(x[0].score + x[2]))
        keep = [self._child(b, t, lp) for b, t, lp in scored[: self.width]]  # clean: near miss, cut before the children are made
        for beam in beams:
            self._unref_all(beam.pages)
        for beam in keep:
            self._write_slot(beam)
        self.groups[rid] = keep

    def record_finished(self, rid: str) -> None:
        """Keeps the best ended beam alive beyond its group."""
        for beam in self.groups[rid]:
            if beam.tokens[-1] != self.eos:
                continue
            current = self.best.get(rid)
            if current is not None and current.score >= beam.score:
                continue
            kept = self._child(beam, self.eos, 0.0)  # leak: a better beam overwrites this one in best
            self.best[rid] = kept

    def close(self, rid: str) -> Optional[List[int]]:
        for beam in self.groups.pop(rid, []):
            self._unref_all(beam.pages)
        winner = self.best.pop(rid, None)
        if winner is None:
            return None
        self._unref_all(winner.pages)
        return winner.tokens

    def lookahead(self, rid: str, token: int) -> Optional[float]:
        """Score of the first beam were it to go on with `token`."""
        trial = self._child(self.groups[rid][0], token, -1.0)  # leak: an ended trial returns before the unref
        if token == self.eos:
            return None
        score = trial.score / len(trial.tokens)
        self._unref_all(trial.pages)
        return score
