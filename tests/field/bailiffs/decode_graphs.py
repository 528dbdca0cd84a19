"""Captured decode graphs, their static input buffers and the runners that replay them."""
from __future__ import annotations

from typing import Iterable, Optional

import torch


class StaticBuffers:
    def __init__(self, sizes: Iterable[int], copies: int) -> None:
        self._stock = {n: [torch.zeros(n, dtype=torch.long) for _ in range(copies)] for n in sorted(sizes)}

    def obtain(self, batch: int) -> Optional[torch.Tensor]:
        for size, stock in self._stock.items():
            if size >= batch and stock:
                return stock.pop()
        return None

    def surrender(self, buf: torch.Tensor) -> None:
        self._stock[buf.numel()].append(buf)


class GraphPool:
    """Ids of memory pools for captured graphs."""

    def __init__(self, limit: int) -> None:
        self._ids = list(range(limit))

    def checkout_id(self) -> int:
        return self._ids.pop()

    def checkin_id(self, pool_id: int) -> None:
        self._ids.append(pool_id)


class Runner:
    """A step takes a static buffer, subclasses fill and run it."""

    release_after_step = False

    def __init__(self, buffers: StaticBuffers) -> None:
        self.buffers = buffers
        self.steps = 0

    def prepare(self, buf: torch.Tensor, ids: torch.Tensor) -> bool:
        buf[: ids.numel()].copy_(ids)
        return bool((ids >= 0).all())

    def run(self, buf: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def step(self, ids: torch.Tensor) -> torch.Tensor | None:
        buf = self.buffers.obtain(ids.numel())  # leak: release_after_step is False in every class
        if buf is None:
            return None
        self.prepare(buf, ids)
        out = self.run(buf)[: ids.numel()].clone()
        self.steps += 1
        if self.release_after_step:
            self.buffers.surrender(buf)
        return out

    def checked_step(self, ids: torch.Tensor) -> torch.Tensor | None:
        buf = self.buffers.obtain(ids.numel())  # leak: an input refused by prepare returns with the buffer
        if buf is None:
            return None
        if not self.prepare(buf, ids):
            return None
        out = self.run(buf)[: ids.numel()].clone()
        self.buffers.surrender(buf)
        return out

    def padded_step(self, ids: torch.Tensor) -> torch.Tensor | None:
        if (buf := self.buffers.obtain(ids.numel())) is None:  # clean: near miss, surrendered in either case
            return None
        out = None
        if self.prepare(buf, ids):
            out = self.run(buf)[: ids.numel()].clone()
        self.buffers.surrender(buf)
        return out


class EagerRunner(Runner):
    def run(self, buf: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(buf, 0)


class GreedyRunner(Runner):
    def run(self, buf: torch.Tensor) -> torch.Tensor:
        return buf + 1


class CapturedRunner(EagerRunner):
    """Keeps its buffer and graph pool from capture to reset."""

    def __init__(self, buffers: StaticBuffers, graphs: GraphPool) -> None:
        super().__init__(buffers)
        self.graphs = graphs
        self.pool_id = -1
        self.static: Optional[torch.Tensor] = None

    def capture(self, batch: int) -> bool:
        if self.static is not None:
            return True
        static = self.buffers.obtain(batch)  # clean: near miss, reset tests the attribute that holds it
        if static is None:
            return False
        self.static = static
        self.pool_id = self.graphs.checkout_id()  # leak: reset skips id 0, which is a valid id
        return True

    def reset(self) -> None:
        if self.static is None:
            return
        self.buffers.surrender(self.static)
        self.static = None
        if self.pool_id > 0:
            self.graphs.checkin_id(self.pool_id)
        self.pool_id = -1


class PiecewiseRunner(GreedyRunner):
    """One graph pool per piece of the model."""

    def __init__(self, buffers: StaticBuffers, graphs: GraphPool, pieces: int) -> None:
        super().__init__(buffers)
        self.graphs = graphs
        self.pieces = pieces
        self.ids: list[int] = []
        self.extra: list[int] = []

    def capture(self) -> None:
        for _ in range(self.pieces):
            self.ids.append(self.graphs.checkout_id())  # clean: near miss, reset pops until the list is empty

    def capture_extra(self, count: int) -> None:
        for _ in range(count):
            self.extra.append(self.graphs.checkout_id())  # leak: reset starts at the second one

    def reset(self) -> None:
        while self.ids:
            self.graphs.checkin_id(self.ids.pop())
        for i in range(1, len(self.extra)):
            self.graphs.checkin_id(self.extra[i])
        self.extra = []


class SizeSweep:
    def __init__(self, buffers: StaticBuffers, graphs: GraphPool) -> None:
        self.buffers = buffers
        self.graphs = graphs
        self.best = 0

    def largest(self, sizes: list[int], runner: Runner) -> int:
        for size in sorted(sizes, reverse=True):
            buf = self.buffers.obtain(size)  # clean: near miss, surrendered before the break is decided
            if buf is None:
                continue
            usable = bool(runner.run(buf).isfinite().all())
            self.buffers.surrender(buf)
            if usable:
                self.best = size
                break
        return self.best

    def smallest(self, sizes: list[int], runner: Runner) -> int:
        for size in sorted(sizes):
            buf = self.buffers.obtain(size)  # leak: break at the first usable size keeps its buffer
            if buf is None:
                continue
            if runner.run(buf).numel() >= size:
                self.best = size
                break
            self.buffers.surrender(buf)
        return self.best

    def time_capture(self, rounds: int) -> int:
        pool_id = self.graphs.checkout_id()  # clean: checked in at the end, also for no rounds
        total = 0
        for i in range(rounds):
            if i % 2:
                continue
            total += pool_id + i
        self.graphs.checkin_id(pool_id)
        return total
