"""Captured decode graphs with shared static inputs."""

from __future__ import annotations

import bisect
import gc
import logging
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

logger = logging.getLogger(__name__)


class StaticInputPool:
    """One tensor set per captured batch size. Sets are exclusive while a replay runs."""

    def __init__(self, sizes: list[int], hidden: int) -> None:
        self.sizes = sorted(sizes)
        self._sets = {s: [torch.zeros(s, hidden) for _ in range(2)] for s in self.sizes}

    def reserve(self, batch: int) -> torch.Tensor | None:
        i = bisect.bisect_left(self.sizes, batch)
        for s in self.sizes[i:]:
            if self._sets[s]:
                return self._sets[s].pop()
        return None

    def unreserve(self, t: torch.Tensor) -> None:
        self._sets[t.shape[0]].append(t)


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph | None
    inp: torch.Tensor
    out: torch.Tensor


class GraphRunner:
    def __init__(self, model: torch.nn.Module, pool: StaticInputPool) -> None:
        self.model = model
        self.pool = pool
        self.graphs: dict[int, Captured] = {}

    def capture(self, batch: int) -> None:
        if batch in self.graphs:
            return
        inp = self.pool.reserve(batch)  # clean: lives in the captured record, release_all() unreserves
        if inp is None:
            raise RuntimeError(f"no static input for {batch}")
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            out = self.model(inp)
        self.graphs[batch] = Captured(g, inp, out)

    def recapture(self, batch: int) -> None:
        old = self.graphs.pop(batch, None)
        if old is not None:
            self.pool.unreserve(old.inp)
        gc.collect()
        self.capture(batch)

    def release_all(self) -> None:
        for c in self.graphs.values():
            self.pool.unreserve(c.inp)
        self.graphs = {}

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        inp = self.pool.reserve(x.shape[0])  # clean: near miss, without a static input it runs on x itself
        if inp is None:
            return self.model(x)
        inp[: x.shape[0]] = x
        y = self.model(inp)[: x.shape[0]].clone()
        self.pool.unreserve(inp)
        return y

    def eager_padded(self, x: torch.Tensor) -> torch.Tensor:
        inp = self.pool.reserve(x.shape[0])  # leak: only unreserved when padding was needed
        if inp is None:
            return self.model(x)
        inp[: x.shape[0]] = x
        y = self.model(inp)
        if inp.shape[0] != x.shape[0]:
            y = y[: x.shape[0]].clone()
            self.pool.unreserve(inp)
        return y

    def max_error(self, x: torch.Tensor) -> float:
        inp = self.pool.reserve(x.shape[0])  # leak: the else branch forgets it
        if inp is not None:
            inp[: x.shape[0]] = x
            if x.shape[0] in self.graphs:
                err = (self.graphs[x.shape[0]].out - self.model(inp)).abs().max().item()
                self.pool.unreserve(inp)
            else:
                err = float("inf")
            return err
        return 0.0

    @contextmanager
    def static_input(self, batch: int):
        t = self.pool.reserve(batch)  # clean: near miss, unreserved in finally if it was granted
        try:
            yield t
        finally:
            if t is not None:
                self.pool.unreserve(t)

    def warmup(self, rounds: int) -> None:
        for size in self.pool.sizes:
            with self.static_input(size) as t:  # clean: with block, break included
                if t is None:
                    break
                for _ in range(rounds):
                    self.model(t)

    def run_pair(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with ExitStack() as stack:
            ta = stack.enter_context(self.static_input(len(a)))  # clean: on the stack
            tb = stack.enter_context(self.static_input(len(b)))  # clean: on the stack
            if ta is None or tb is None:
                return torch.cat([self.model(a), self.model(b)])
            ta[: len(a)], tb[: len(b)] = a, b
            return torch.cat([self.model(ta)[: len(a)], self.model(tb)[: len(b)]])

    def run_stacked(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        with ExitStack() as stack:
            outs = []
            for x in xs:
                t = self.pool.reserve(len(x))  # clean: near miss, its unreserve is a callback of the stack
                if t is None:
                    continue
                stack.callback(self.pool.unreserve, t)
                t[: len(x)] = x
                outs.append(self.model(t)[: len(x)].clone())
            return outs


class ReplaySession:
    def __init__(self, runner: GraphRunner, batch: int, keep_logits: bool = False) -> None:
        self.runner = runner
        self.inp = runner.pool.reserve(batch)  # clean: __exit__ unreserves in every case
        self.logits = runner.pool.reserve(batch) if keep_logits else None  # leak: __exit__ forgets the second field

    def __enter__(self) -> Self:
        return self

    def __exit__(self, et: type[BaseException] | None, ev: BaseException | None, tb: TracebackType | None) -> None:
        if self.inp is not None:
            self.runner.pool.unreserve(self.inp)
            self.inp = None

    def feed(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.inp is None:
            return None
        self.inp[: len(x)].copy_(x)
        return self.runner.model(self.inp)


def sweep(runner: GraphRunner, sizes: list[int]) -> dict[int, float]:
    res = {}
    for s in sizes:
        sess = ReplaySession(runner, s)  # leak: used without with, never exited
        y = sess.feed(torch.ones(s, runner.pool._sets[s][0].shape[1] if runner.pool._sets[s] else 1))
        res[s] = 0.0 if y is None else float(y.mean())
    return res


def sweep_once(runner: GraphRunner, s: int, x: torch.Tensor) -> float:
    with ReplaySession(runner, s) as sess:  # clean: with block
        y = sess.feed(x)
        if y is None:
            return 0.0
        return float(y.mean())
