"""CUDA graph replay: static input sets by batch size and a memory-pool handle for capture."""
from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch

log = logging.getLogger("graphs")


@dataclass
class InputSet:
    bs: int
    ids: torch.Tensor
    positions: torch.Tensor
    owner: Optional[str] = None


class InputSets:
    """rent() gives the smallest idle set which holds bs rows, or None."""

    def __init__(self, sizes: list[int], copies: int):
        self.sizes = sorted(sizes)
        self.idle: dict[int, list[InputSet]] = {
            n: [InputSet(n, torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)) for _ in range(copies)]
            for n in self.sizes
        }

    def rent(self, bs: int, owner: str) -> Optional[InputSet]:
        for n in self.sizes[bisect_left(self.sizes, bs):]:
            if self.idle[n]:
                s = self.idle[n].pop()  # clean: returned to the caller
                s.owner = owner
                return s
        return None

    def rent_exact(self, bs: int, owner: str) -> Optional[InputSet]:
        s = self.rent(bs, owner)  # leak: a larger set is refused and stays rented
        if s is None or s.bs != bs:
            return None
        return s

    def vacate(self, s: InputSet) -> None:
        s.owner = None
        self.idle[s.bs].append(s)


class GraphRunner:
    def __init__(self, sets: InputSets, model: Callable[..., torch.Tensor], eager: bool = False):
        self.sets = sets
        self.model = model
        self.eager = eager
        self.graphs: dict[int, Any] = {}
        self.bound: dict[str, InputSet] = {}
        self._cur: Optional[InputSet] = None

    def capture(self, bs: int) -> bool:
        s = self.sets.rent(bs, "capture")  # leak: an already captured size returns before vacate()
        if s is None:
            return False
        if s.bs in self.graphs:
            return True
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            self.model(s.ids, s.positions)
        self.graphs[s.bs] = g
        self.sets.vacate(s)
        return True

    def begin(self, bs: int) -> bool:
        if self.eager:
            return False
        self._cur = self.sets.rent(bs, "step")  # clean: near miss, end() vacates it under the same flag
        return self._cur is not None

    def end(self) -> None:
        if self.eager:
            return
        if self._cur is not None:
            self.sets.vacate(self._cur)
            self._cur = None

    def step(self, ids: torch.Tensor) -> Optional[torch.Tensor]:
        if not self.begin(len(ids)):
            return None
        try:
            self._cur.ids[: len(ids)].copy_(ids)
            self.graphs[self._cur.bs].replay()
            return self._cur.ids.clone()
        finally:
            self.end()

    def bind(self, rid: str, bs: int) -> bool:
        if rid in self.bound:
            return True
        s = self.sets.rent(bs, rid)  # clean: kept in bound until unbind()
        if s is None:
            return False
        self.bound[rid] = s
        return True

    def unbind(self, rid: str) -> None:
        s = self.bound.pop(rid, None)
        if s is not None:
            self.sets.vacate(s)

    def rebind(self, rid: str, bs: int) -> bool:
        s = self.sets.rent(bs, rid)  # leak: an unknown rid returns False with the new set rented
        if s is None:
            return False
        old = self.bound.get(rid)
        if old is None:
            log.warning("rebind of unknown %s", rid)
            return False
        self.sets.vacate(old)
        self.bound[rid] = s
        return True

    def replay(self, ids: torch.Tensor, borrowed: Optional[InputSet] = None) -> bool:
        own = borrowed is None
        s = self.sets.rent(len(ids), "replay") if own else borrowed  # clean: near miss, vacated if own
        if s is None:
            return False
        s.ids[: len(ids)].copy_(ids)
        g = self.graphs.get(s.bs)
        if g is not None:
            g.replay()
        if own:
            self.sets.vacate(s)
        return g is not None

    def replay_or_eager(self, ids: torch.Tensor, borrowed: Optional[InputSet] = None) -> torch.Tensor:
        s = borrowed or self.sets.rent(len(ids), "replay")  # leak: a size without a graph goes eager with the set rented
        if s is None or s.bs not in self.graphs:
            return self.model(ids, torch.arange(len(ids)))
        s.ids[: len(ids)].copy_(ids)
        self.graphs[s.bs].replay()
        out = s.ids.clone()
        if borrowed is None:
            self.sets.vacate(s)
        return out

    def sweep(self, sizes: list[int], fn: Callable[[InputSet], float]) -> dict[int, float]:
        times: dict[int, float] = {}
        for bs in sizes:
            s = self.sets.rent(bs, "sweep")  # clean: vacated by the callee _time()
            if s is None:
                continue
            times[bs] = self._time(s, fn)
        return times

    def _time(self, s: InputSet, fn: Callable[[InputSet], float]) -> float:
        try:
            return min(fn(s) for _ in range(3))
        finally:
            self.sets.vacate(s)

    def pad_ids(self, ids: torch.Tensor) -> torch.Tensor:
        s = self.sets.rent(len(ids), "pad")  # leak: the padded copy is returned, the set is dropped
        if s is None:
            return ids
        s.ids.zero_()
        s.ids[: len(ids)].copy_(ids)
        return s.ids.clone()
