"""Beam search over shared KV pages: forking, pruning and copy-on-write with page reference counts."""
from __future__ import annotations

from array import array
from typing import Dict, List, Optional, Tuple


class PageTable:
    """Counts in an array; page 0 is the null page and is never handed out."""

    def __init__(self, pages: int) -> None:
        self._count = array("i", [0] * (pages + 1))
        self._count[0] = 1
        self._hint = 1

    def new_page(self) -> int:
        """A page with count one, or 0."""
        n = len(self._count)
        for step in range(n):
            page = (self._hint + step) % n
            if self._count[page] == 0:
                self._count[page] = 1
                self._hint = page + 1
                return page
        return 0

    def incref(self, page: int) -> None:
        self._count[page] += 1

    def decref(self, page: int) -> None:
        self._count[page] -= 1

    def shared(self, page: int) -> bool:
        return self._count[page] > 1

    def live(self) -> int:
        return sum(1 for c in self._count[1:] if c)


class Beam:
    def __init__(self, pages: List[int], score: float = 0.0) -> None:
        self.pages = pages
        self.score = score
        self.done = False


class BeamSearch:
    """Every page in a beam's list carries one count for that beam; `retire` drops them."""

    def __init__(self, table: PageTable, width: int) -> None:
        self.table = table
        self.width = width
        self.beams: List[Beam] = []
        self.best: Optional[Beam] = None

    def retire(self, beam: Beam) -> None:
        for page in beam.pages:
            self.table.decref(page)
        beam.pages = []

    def fork(self, beam: Beam, delta: float) -> Beam:
        for page in beam.pages:
            self.table.incref(page)  # clean: the new beam's list holds the count
        return Beam(list(beam.pages), beam.score + delta)

    def grow(self, beam: Beam) -> bool:
        page = self.table.new_page()  # clean: appended to the beam
        if not page:
            return False
        beam.pages.append(page)
        return True

    def write_last(self, beam: Beam) -> Optional[Tuple[int, int]]:
        last = beam.pages[-1]
        if not self.table.shared(last):
            return None
        page = self.table.new_page()  # clean: near miss, takes the place of last whose count is dropped
        if not page:
            return None
        beam.pages[-1] = page
        self.table.decref(last)
        return last, page

    def advance(self, choices: List[Tuple[int, float]]) -> None:
        """`choices` are (parent, delta) of the surviving beams."""
        nxt = [self.fork(self.beams[parent], delta) for parent, delta in choices[: self.width]]  # clean: become the beams, the parents are retired
        for beam in self.beams:
            self.retire(beam)
        self.beams = nxt

    def keep_best(self) -> None:
        """Remember the best finished hypothesis."""
        for beam in self.beams:
            if not beam.done or (self.best is not None and self.best.score >= beam.score):
                continue
            if self.best is not None:
                self.retire(self.best)
            self.best = self.fork(beam, 0.0)  # clean: near miss, the earlier best is retired first

    def finish(self) -> None:
        for beam in self.beams:
            self.retire(beam)
        self.beams = []
        if self.best is not None:
            self.retire(self.best)
            self.best = None


class DiverseBeamSearch:
    def __init__(self, table: PageTable, search: BeamSearch) -> None:
        self.table = table
        self.search = search
        self.groups: Dict[int, Beam] = {}
        self.parked: Dict[str, Beam] = {}

    def seed(self, group: int, beam: Beam) -> None:
        self.groups[group] = self.search.fork(beam, 0.0)  # leak: seeding a group again overwrites its beam

    def drop_group(self, group: int) -> None:
        beam = self.groups.pop(group, None)
        if beam is not None:
            self.search.retire(beam)

    def park(self, name: str, beam: Beam) -> bool:
        if name in self.parked:
            return False
        self.parked[name] = self.search.fork(beam, 0.0)  # leak: resume takes a finished beam out and forgets it
        return True

    def resume(self, name: str) -> bool:
        beam = self.parked.pop(name, None)
        if beam is None or beam.done:
            return False
        self.search.beams.append(beam)
        return True

    def explore(self, beam: Beam, deltas: List[float], floor: float) -> List[Beam]:
        out: List[Beam] = []
        for d in deltas:
            child = self.search.fork(beam, d)  # leak: children below the floor are skipped without retiring
            if child.score < floor:
                continue
            out.append(child)
        return out

    def rescore(self, beam: Beam, deltas: List[float]) -> float:
        tries = self.explore(beam, deltas, float("-inf"))  # clean: all retired after the maximum is taken
        best = max((t.score for t in tries), default=beam.score)
        for t in tries:
            self.search.retire(t)
        return best

    def lookahead(self, beam: Beam, steps: int) -> int:
        """How many pages this beam could still grow by."""
        trial = self.search.fork(beam, 0.0)  # leak: out of pages returns the count without retiring the trial
        n = 0
        while n < steps:
            if not self.search.grow(trial):
                return n
            n += 1
        self.search.retire(trial)
        return n
