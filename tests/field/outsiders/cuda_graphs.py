from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch


class StaticBuffers:
    """Static inputs of captured graphs, keyed by padded batch size."""

    def __init__(self, hidden: int):
        self.hidden = hidden
        self._shelves: dict[int, list[torch.Tensor]] = {}
        self.lent = 0

    def loan(self, bs: int) -> torch.Tensor:
        shelf = self._shelves.setdefault(bs, [])
        self.lent += 1
        return shelf.pop() if shelf else torch.zeros(bs, self.hidden)

    def reclaim(self, t: torch.Tensor) -> None:
        self.lent -= 1
        self._shelves[t.shape[0]].append(t)

    def shrink(self, bs: int, keep: int) -> int:
        shelf = self._shelves.get(bs, [])
        dropped = 0
        while len(shelf) > keep:
            shelf.pop()  # clean: near miss, shrinking is meant to let the tensor go
            dropped += 1
        return dropped


@dataclass
class CapturedGraph:
    graph: Any
    static_in: torch.Tensor
    static_out: torch.Tensor


class GraphRunner:
    SIZES = (1, 2, 4, 8, 16, 32)

    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], bufs: StaticBuffers) -> None:
        self.model = model
        self.bufs = bufs
        self.graphs: dict[int, CapturedGraph] = {}

    def _padded(self, n: int) -> Optional[int]:
        for s in self.SIZES:
            if s >= n:
                return s
        return None

    def capture(self, bs: int) -> CapturedGraph:
        if bs in self.graphs:
            return self.graphs[bs]
        static_in = self.bufs.loan(bs)  # clean: lives in the captured graph until reset()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            static_out = self.model(static_in)
        self.graphs[bs] = CapturedGraph(g, static_in, static_out)
        return self.graphs[bs]

    def capture_all(self) -> None:
        for bs in reversed(self.SIZES):
            self.capture(bs)

    def recapture(self, bs: int) -> None:
        static_in = self.bufs.loan(bs)  # clean: replaces the popped graph, whose input is reclaimed
        old = self.graphs.pop(bs, None)
        if old is not None:
            self.bufs.reclaim(old.static_in)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            out = self.model(static_in)
        self.graphs[bs] = CapturedGraph(g, static_in, out)

    def try_capture(self, bs: int) -> bool:
        static_in = self.bufs.loan(bs)  # leak: the handler of a failed capture answers False and keeps the loan
        g = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(g):
                out = self.model(static_in)
            if out.shape[0] != bs:
                raise RuntimeError("batch dimension lost")
        except RuntimeError:
            return False
        stale = self.graphs.pop(bs, None)
        if stale is not None:
            self.bufs.reclaim(stale.static_in)
        self.graphs[bs] = CapturedGraph(g, static_in, out)
        return True

    def run(self, x: torch.Tensor) -> torch.Tensor:
        bs = self._padded(x.shape[0])
        if bs is None or bs not in self.graphs:
            return self.run_eager(x)
        cg = self.graphs[bs]
        cg.static_in[: x.shape[0]].copy_(x)
        cg.graph.replay()
        return cg.static_out[: x.shape[0]].clone()

    def run_eager(self, x: torch.Tensor) -> torch.Tensor:
        bs = self._padded(x.shape[0])
        if bs is None:
            return self.model(x)
        pad = self.bufs.loan(bs)  # clean: near miss, unpadded sizes return before the loan
        pad.zero_()
        pad[: x.shape[0]].copy_(x)
        out = self.model(pad)[: x.shape[0]]
        self.bufs.reclaim(pad)
        return out

    def run_padded(self, x: torch.Tensor, bs: int) -> torch.Tensor:
        pad = self.bufs.loan(bs)  # leak: a view of the result is returned and the padded input forgotten
        pad.zero_()
        pad[: x.shape[0]].copy_(x)
        return self.model(pad)[: x.shape[0]]

    def warmup(self, rounds: int) -> None:
        for bs in self.SIZES:
            x = self.bufs.loan(bs)  # clean: one loan per size, reclaimed after the rounds
            for _ in range(rounds):
                y = self.model(x)
                if not torch.isfinite(y).all():
                    break
            self.bufs.reclaim(x)

    def compare(self, bs: int) -> float:
        x = self.bufs.loan(bs)  # leak: without a graph the comparison returns at once
        x.normal_()
        cg = self.graphs.get(bs)
        if cg is None:
            return float("nan")
        diff = (self.run(x) - self.model(x)).abs().max().item()
        self.bufs.reclaim(x)
        return diff

    def reset(self) -> None:
        for cg in self.graphs.values():
            self.bufs.reclaim(cg.static_in)
        self.graphs.clear()
