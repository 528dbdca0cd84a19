"""CUDA-graph runner: static input buffers are leased per batch size, graphs hold memory segments."""
from __future__ import annotations

import bisect
import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

import torch

PAD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass
class StaticInputs:
    batch: int
    input_ids: "torch.Tensor"
    positions: "torch.Tensor"
    slot_mapping: "torch.Tensor"


class StaticInputPool:
    """A few copies of static inputs for each padded batch size."""

    def __init__(self, copies: int, device: str):
        self.copies = copies
        self.device = device
        self._shelf: dict[int, list[StaticInputs]] = {}
        self._made: dict[int, int] = {}

    def _build(self, size: int) -> StaticInputs:
        zeros = [torch.zeros(size, dtype=torch.long, device=self.device) for _ in range(3)]
        return StaticInputs(size, *zeros)

    def lease(self, size: int) -> StaticInputs | None:
        shelf = self._shelf.setdefault(size, [])
        if shelf:
            return shelf.pop()
        if self._made.get(size, 0) >= self.copies:
            return None
        self._made[size] = self._made.get(size, 0) + 1
        return self._build(size)

    def unlease(self, inputs: StaticInputs) -> None:
        self._shelf[inputs.batch].append(inputs)

    def lease_fitting(self, n: int) -> StaticInputs | None:
        for size in PAD_SIZES[bisect.bisect_left(PAD_SIZES, n):]:
            inputs = self.lease(size)  # clean: near miss, None tries the next size, otherwise handed on
            if inputs is not None:
                return inputs
        return None

    @contextlib.contextmanager
    def leased(self, n: int) -> Iterator[StaticInputs | None]:
        inputs = self.lease_fitting(n)  # clean: unleased after the block
        try:
            yield inputs
        finally:
            if inputs is not None:
                self.unlease(inputs)

    @contextlib.contextmanager
    def leased_exact(self, n: int) -> Iterator[StaticInputs | None]:
        inputs = self.lease(n)  # leak: unleased only if all positions were reset to zero
        yield inputs
        if inputs is not None and not bool(inputs.positions.any()):
            self.unlease(inputs)


@dataclass
class Segment:
    nbytes: int
    graphs: int = 0


class SegmentArena:
    def __init__(self, limit: int):
        self.limit = limit
        self.in_use = 0

    def carve(self, nbytes: int) -> Segment:
        if self.in_use + nbytes > self.limit:
            raise MemoryError(f"graph arena full: {self.in_use} of {self.limit}")
        self.in_use += nbytes
        return Segment(nbytes)

    def reclaim(self, segment: Segment) -> None:
        self.in_use -= segment.nbytes


@dataclass
class CapturedGraph:
    size: int
    replay: Callable[[], Any]
    inputs: StaticInputs
    segment: Segment | None
    uses: int = 0
    owned: bool = field(default=True)


class GraphRunner:
    def __init__(self, model: Callable[..., "torch.Tensor"], pool: StaticInputPool, arena: SegmentArena):
        self.model = model
        self.pool = pool
        self.arena = arena
        self.graphs: dict[int, CapturedGraph] = {}
        self.eager_calls = 0

    def capture(self, size: int) -> bool:
        if size in self.graphs:
            return False
        segment = self.arena.carve(size << 20)  # clean: reclaimed without inputs, else kept in the graph
        inputs = self.pool.lease(size)  # clean: near miss, the captured graph keeps them until drop
        if inputs is None:
            self.arena.reclaim(segment)
            return False
        graph = self._record(inputs)
        self.graphs[size] = CapturedGraph(size, graph, inputs, segment)
        return True

    def _record(self, inputs: StaticInputs) -> Callable[[], Any]:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            self.model(inputs.input_ids, inputs.positions)
        return g.replay

    def recapture(self, size: int) -> None:
        old = self.graphs[size]
        segment = self.arena.carve(size << 20)  # clean: near miss, stored, and the old segment is reclaimed
        old.replay = self._record(old.inputs)
        if old.segment is not None:
            self.arena.reclaim(old.segment)
        old.segment = segment

    def drop(self, size: int) -> None:
        graph = self.graphs.pop(size)
        self.pool.unlease(graph.inputs)
        if graph.segment is not None:
            self.arena.reclaim(graph.segment)

    def drop_all(self) -> None:
        for size in list(self.graphs):
            self.drop(size)

    def run_eager(self, ids: "torch.Tensor") -> "torch.Tensor":
        n = ids.numel()
        inputs = self.pool.lease_fitting(n)  # leak: returned to no shelf when the output needs no padding cut
        if inputs is None:
            return self.model(ids, torch.arange(n))
        inputs.input_ids[:n].copy_(ids)
        self.eager_calls += 1
        out = self.model(inputs.input_ids, inputs.positions)
        if inputs.batch == n:
            return out
        self.pool.unlease(inputs)
        return out[:n]

    def run_padded(self, ids: "torch.Tensor") -> "torch.Tensor":
        n = ids.numel()
        with self.pool.leased(n) as inputs:  # clean: the context manager unleases on both returns
            if inputs is None:
                return self.model(ids, torch.arange(n))
            inputs.input_ids[:n].copy_(ids)
            return self.model(inputs.input_ids, inputs.positions)[:n].clone()

    def run_split(self, ids: "torch.Tensor", half: int) -> "torch.Tensor":
        a = self.pool.lease_fitting(half)  # clean: unleased on all paths that hold it
        if a is None:
            return self.model(ids, torch.arange(ids.numel()))
        b = self.pool.lease_fitting(ids.numel() - half)  # clean: unleased with the first half
        if b is None:
            self.pool.unlease(a)
            return self.model(ids, torch.arange(ids.numel()))
        a.input_ids[:half].copy_(ids[:half])
        b.input_ids[: ids.numel() - half].copy_(ids[half:])
        out = torch.cat([self.model(x.input_ids, x.positions) for x in (a, b)])
        for x in (a, b):
            self.pool.unlease(x)
        return out

    def warm_sizes(self, sizes: list[int]) -> dict[int, float]:
        timing: dict[int, float] = {}
        for size in sizes:
            segment = self.arena.carve(size << 20)  # leak: sizes already captured continue with it
            if size in self.graphs:
                continue
            timing[size] = self._time(segment)
            self.arena.reclaim(segment)
        return timing

    def warm_missing(self, sizes: list[int]) -> dict[int, float]:
        timing: dict[int, float] = {}
        for size in sizes:
            if size in self.graphs:
                continue
            segment = self.arena.carve(size << 20)  # clean: reclaimed in the same turn
            timing[size] = self._time(segment)
            self.arena.reclaim(segment)
        return timing

    def _time(self, segment: Segment) -> float:
        segment.graphs += 1
        return segment.nbytes / 1e9

    def trial(self, size: int, keep: bool) -> bool:
        segment = self.arena.carve(size << 20)  # clean: near miss, keep hands it to a graph, else reclaimed
        cost = self._time(segment)
        if keep and size in self.graphs and self.graphs[size].segment is None:
            self.graphs[size].segment = segment
        else:
            self.arena.reclaim(segment)
        return cost < 1.0

    def trial_owned(self, size: int, keep: bool) -> bool:
        segment = self.arena.carve(size << 20)  # leak: keep without a captured graph stores it nowhere
        cost = self._time(segment)
        if keep:
            graph = self.graphs.get(size)
            if graph is not None and graph.segment is None:
                graph.segment = segment
        else:
            self.arena.reclaim(segment)
        return cost < 1.0
