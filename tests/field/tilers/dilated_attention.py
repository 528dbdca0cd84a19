"""Dilated attention (LongNet style) with leased gather workspaces."""
from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger(__name__)


class WorkspaceBudgetError(RuntimeError):
    pass


@dataclass
class Workspace:
    view: Any
    numel: int


class WorkspaceArena:
    """Carves flat workspaces out of a budget; keeps returned ones for reuse by size."""

    def __init__(self, budget: int, device: str = "cpu") -> None:
        self.budget = budget
        self.device = device
        self.in_use = 0
        self._idle: Dict[int, List[Workspace]] = {}

    def try_lease(self, numel: int) -> Optional[Workspace]:
        if self.in_use + numel > self.budget:
            return None
        self.in_use += numel
        idle = self._idle.get(numel)
        if idle:
            return idle.pop()
        view = torch.empty(numel, device=self.device) if torch is not None else [0.0] * numel
        return Workspace(view, numel)

    def lease(self, numel: int) -> Workspace:
        ws = self.try_lease(numel)  # clean: returned, None turned into an exception
        if ws is None:
            raise WorkspaceBudgetError(f"{numel} over budget ({self.in_use}/{self.budget})")
        return ws

    def give_back(self, ws: Workspace) -> None:
        self.in_use -= ws.numel
        self._idle.setdefault(ws.numel, []).append(ws)

    @contextmanager
    def leased(self, numel: int) -> Iterator[Workspace]:
        ws = self.lease(numel)  # clean: given back in finally
        try:
            yield ws
        finally:
            self.give_back(ws)


@contextmanager
def gather_scratch(arena: WorkspaceArena, numel: int) -> Iterator[Any]:
    ws = arena.lease(numel)  # leak: no finally, and sweep_ratios survives the exception of its body
    yield ws.view
    arena.give_back(ws)


def gather_dilated(x: Sequence[float], segment: int, ratio: int, arena: WorkspaceArena) -> Workspace:
    picked = [x[i] for s in range(0, len(x), segment) for i in range(s, min(s + segment, len(x)), ratio)]
    ws = arena.lease(max(1, len(picked)))  # clean: returned to the caller
    for i, value in enumerate(picked):
        ws.view[i] = value
    return ws


def attend(q: Any, k: Any, v: Any) -> Optional[List[float]]:
    if not any(k):
        return None
    return [float(a) for a in v]


class DilatedAttention:
    def __init__(self, arena: WorkspaceArena, segments: Sequence[int], ratios: Sequence[int]) -> None:
        self.arena = arena
        self.segments = list(segments)
        self.ratios = list(ratios)
        self._scratch: Optional[Workspace] = None
        self._lse: Optional[Workspace] = None

    def forward(self, q: Sequence[float], k: Sequence[float], v: Sequence[float]) -> List[List[float]]:
        outs = []
        for seg, ratio in zip(self.segments, self.ratios):
            if len(q) < seg:
                continue
            qw = gather_dilated(q, seg, ratio, self.arena)  # clean: given back on both branches
            kw = gather_dilated(k, seg, ratio, self.arena)  # clean: given back on both branches
            vw = gather_dilated(v, seg, ratio, self.arena)  # leak: fully masked segment gives back q and k only
            out = attend(qw.view, kw.view, vw.view)
            if out is None:
                self.arena.give_back(qw)
                self.arena.give_back(kw)
                continue
            outs.append(out)
            for ws in (qw, kw, vw):
                self.arena.give_back(ws)
        return outs

    def segment_summary(self, x: Sequence[float]) -> List[float]:
        ws = gather_dilated(x, self.segments[0], self.ratios[0], self.arena)  # leak: copied out and dropped
        return list(ws.view)

    def score_scratch(self, numel: int) -> Any:
        if self._scratch is None or self._scratch.numel < numel:
            self._scratch = self.arena.lease(numel)  # leak: growing overwrites the smaller workspace
        return self._scratch.view

    def lse_scratch(self, numel: int) -> Any:
        if self._lse is not None and self._lse.numel < numel:
            self.arena.give_back(self._lse)
            self._lse = None
        if self._lse is None:
            self._lse = self.arena.lease(numel)  # clean: near miss, the smaller one was given back first
        return self._lse.view

    def close(self) -> None:
        for ws in (self._scratch, self._lse):
            if ws is not None:
                self.arena.give_back(ws)
        self._scratch = self._lse = None


def merge_branches(outs: List[List[float]], arena: WorkspaceArena) -> Optional[List[float]]:
    n = max(len(o) for o in outs)
    acc = arena.try_lease(n)  # leak: not given back when the weights do not fit
    if acc is None:
        return None
    weights = arena.try_lease(n)  # clean: None-checked and given back below
    if weights is None:
        return None
    merged = [sum(o[i] for o in outs if i < len(o)) for i in range(n)]
    arena.give_back(weights)
    arena.give_back(acc)
    return merged


def merge_branches_weighted(outs: List[List[float]], w: Sequence[float], arena: WorkspaceArena) -> Optional[List[float]]:
    n = max(len(o) for o in outs)
    acc = arena.try_lease(n)  # clean: near miss, one test for both and the taken one is rolled back
    weights = arena.try_lease(n)  # clean: near miss, one test for both and the taken one is rolled back
    if acc is None or weights is None:
        for ws in (acc, weights):
            if ws is not None:
                arena.give_back(ws)
        return None
    merged = [sum(o[i] * wi for o, wi in zip(outs, w) if i < len(o)) for i in range(n)]
    arena.give_back(acc)
    arena.give_back(weights)
    return merged


def sweep_ratios(x: Sequence[float], ratios: Sequence[int], arena: WorkspaceArena) -> Dict[int, float]:
    report: Dict[int, float] = {}
    for r in ratios:
        try:
            with gather_scratch(arena, len(x)) as view:  # clean: the context manager owns the lease
                for i in range(0, len(x), r):
                    view[i] = x[i]
                report[r] = sum(view[::r]) / (len(x) // r)
        except ZeroDivisionError:
            log.warning("ratio %d longer than the sequence", r)
    return report


def first_nonzero(x: Sequence[float], arena: WorkspaceArena) -> int:
    with arena.leased(len(x)) as ws:  # clean: near miss, returns from inside the with block
        for i, value in enumerate(x):
            ws.view[i] = value
            if value:
                return i
    return -1


if __name__ == "__main__":
    arena_ = WorkspaceArena(1 << 16)
    layer = DilatedAttention(arena_, [4, 8], [1, 2])
    xs = [float(i) for i in range(16)]
    print(len(layer.forward(xs, xs, xs)), merge_branches([xs, xs], arena_)[:3])
    print(merge_branches_weighted([xs, xs], [0.5, 0.5], arena_)[:3], first_nonzero(xs, arena_))
    print(sweep_ratios(xs, [1, 2, 32], arena_), layer.segment_summary(xs)[:2])
    layer.score_scratch(8), layer.lse_scratch(8), layer.close()
