"""Beams of one request and how they replace one another."""
import heapq
from dataclasses import dataclass
from typing import List

from .pool import NoRow, PagePool, Rows

EOS = 2


@dataclass
class Candidate:
    parent: int
    token: int
    score: float


class Beam:
    """Owns a row and one reference on each of its pages until retire()."""

    def __init__(self, pool: PagePool, rows: Rows, pages: List[int], row: int, tokens: List[int], score: float = 0.0) -> None:
        self.pool, self.rows = pool, rows
        self.pages, self.row = pages, row
        self.tokens, self.score = tokens, score

    def __lt__(self, other: "Beam") -> bool:
        return self.score < other.score

    def fork(self) -> "Beam":
        pages = [self.pool.incref(p) for p in self.pages]  # leak: without a row NoRow is raised and the references stay counted
        row = self.rows.take_row()  # clean: the new beam has it
        if row is None:
            raise NoRow()
        return Beam(self.pool, self.rows, pages, row, list(self.tokens), self.score)

    def push(self, token: int, score: float) -> None:
        if len(self.tokens) % self.pool.page_size == 0:
            self.pages.append(self.pool.alloc())  # clean: in the pages of the beam
        elif self.pool.shared(self.pages[-1]):
            own = self.pool.alloc()  # clean: near miss, it replaces a shared page whose reference is dropped next
            self.pool.decref(self.pages[-1])
            self.pages[-1] = own
        self.tokens.append(token)
        self.score = score

    def retire(self) -> None:
        for page in self.pages:
            self.pool.decref(page)
        self.pages = []
        if self.row >= 0:
            self.rows.drop_row(self.row)
            self.row = -1


class BeamGroup:
    def __init__(self, root: Beam, width: int) -> None:
        self.width = width
        self.beams: List[Beam] = [root]
        self.done: List[Beam] = []

    def advance(self, ranked: List[Candidate], floor: float) -> None:
        """Replaces the beams by the children that the candidates describe."""
        children: List[Beam] = []
        for cand in ranked[: 2 * self.width]:
            child = self.beams[cand.parent].fork()  # leak: a child below the floor is skipped, and PoolDry out of push() loses all children so far
            if cand.score < floor:
                continue
            child.push(cand.token, cand.score)
            children.append(child)
        for beam in self.beams:
            beam.retire()
        children.sort(reverse=True)
        for extra in children[self.width:]:
            extra.retire()
        self.beams = children[: self.width]

    def harvest(self) -> None:
        """Finished beams go to a heap that keeps the best of them."""
        for beam in [b for b in self.beams if b.tokens[-1] == EOS]:
            self.beams.remove(beam)
            heapq.heappush(self.done, beam)
            if len(self.done) > self.width:
                heapq.heappop(self.done).retire()

    @property
    def finished(self) -> bool:
        if not self.beams:
            return True
        return len(self.done) == self.width and max(self.beams).score < min(self.done).score

    def best(self) -> Beam:
        return max(self.done or self.beams)

    def close(self) -> None:
        for beam in self.beams + self.done:
            beam.retire()
        self.beams, self.done = [], []
