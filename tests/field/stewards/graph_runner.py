from __future__ import annotations

import bisect
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import Callable, Optional

import torch


@dataclass(eq=False)
class StaticInputs:
    batch: int
    input_ids: torch.Tensor
    positions: torch.Tensor


class StaticInputArena:
    def __init__(self, sizes: list[int], per_size: int, device: torch.device) -> None:
        self.sizes = sorted(sizes)
        self._idle: dict[int, list[StaticInputs]] = defaultdict(list)
        for size in self.sizes:
            for _ in range(per_size):
                self._idle[size].append(StaticInputs(
                    size,
                    torch.zeros(size, dtype=torch.long, device=device),
                    torch.zeros(size, dtype=torch.long, device=device),
                ))

    def checkout(self, batch: int) -> Optional[StaticInputs]:
        at = bisect.bisect_left(self.sizes, batch)
        for size in self.sizes[at:]:
            if self._idle[size]:
                return self._idle[size].pop()
        return None

    def checkin(self, inputs: StaticInputs) -> None:
        inputs.input_ids.zero_()
        inputs.positions.zero_()
        self._idle[inputs.batch].append(inputs)


class GraphPoolRegistry:
    def __init__(self) -> None:
        self._refs: dict[int, int] = {}
        self._handles: dict[int, object] = {}

    def retain(self, stage: int) -> object:
        if stage not in self._handles:
            self._handles[stage] = torch.cuda.graph_pool_handle()
        self._refs[stage] = self._refs.get(stage, 0) + 1
        return self._handles[stage]

    def drop(self, stage: int) -> None:
        self._refs[stage] -= 1
        if self._refs[stage] == 0:
            del self._refs[stage], self._handles[stage]


class InputLease:
    def __init__(self, arena: StaticInputArena, batch: int) -> None:
        self.arena = arena
        self.batch = batch
        self.inputs: Optional[StaticInputs] = None

    def __enter__(self) -> Optional[StaticInputs]:
        self.inputs = self.arena.checkout(self.batch)  # clean: __exit__ checks it in whatever the body does
        return self.inputs

    def __exit__(self, et: Optional[type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        if self.inputs is not None:
            self.arena.checkin(self.inputs)
            self.inputs = None


class CaptureScope:
    def __init__(self, arena: StaticInputArena, batch: int) -> None:
        self.arena = arena
        self.batch = batch
        self.inputs: Optional[StaticInputs] = None
        self.error: Optional[BaseException] = None

    def __enter__(self) -> Optional[StaticInputs]:
        self.inputs = self.arena.checkout(self.batch)  # leak: __exit__ returns before the checkin when it swallows an OOM
        return self.inputs

    def __exit__(self, et: Optional[type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> bool:
        if et is not None and issubclass(et, torch.cuda.OutOfMemoryError):
            self.error = ev
            return True
        if self.inputs is not None:
            self.arena.checkin(self.inputs)
        return False


@dataclass
class CapturedGraph:
    stage: int
    graph: torch.cuda.CUDAGraph
    inputs: StaticInputs
    output: torch.Tensor


class GraphRunner:
    def __init__(self, model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], arena: StaticInputArena,
                 pools: GraphPoolRegistry, max_graphs: int = 16) -> None:
        self.model = model
        self.arena = arena
        self.pools = pools
        self.max_graphs = max_graphs
        self.graphs: OrderedDict[int, CapturedGraph] = OrderedDict()

    def capture(self, batch: int, stage: int = 0) -> Optional[CapturedGraph]:
        if batch in self.graphs:
            return self.graphs[batch]
        pool = self.pools.retain(stage)  # leak: kept when no static inputs are left for the batch
        inputs = self.arena.checkout(batch)  # clean: near miss, belongs to the captured graph, checked in by evict or by the handler
        if inputs is None:
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                output = self.model(inputs.input_ids, inputs.positions)
        except torch.cuda.OutOfMemoryError:
            self.arena.checkin(inputs)
            self.pools.drop(stage)
            return None
        captured = CapturedGraph(stage, graph, inputs, output)
        self.graphs[batch] = captured
        if len(self.graphs) > self.max_graphs:
            self.evict(next(iter(self.graphs)))
        return captured

    def evict(self, batch: int) -> None:
        captured = self.graphs.pop(batch)
        captured.graph.reset()
        self.arena.checkin(captured.inputs)
        self.pools.drop(captured.stage)

    def recapture(self, batch: int) -> bool:
        old = self.graphs.get(batch)
        if old is None:
            return False
        inputs = self.arena.checkout(batch)  # leak: the graph it replaces goes with its own static inputs
        if inputs is None:
            return False
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.model(inputs.input_ids, inputs.positions)
        self.graphs[batch] = CapturedGraph(old.stage, graph, inputs, output)
        return True

    def replay(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        captured = self.graphs.get(ids.numel())
        if captured is not None:
            captured.inputs.input_ids.copy_(ids)
            captured.inputs.positions.copy_(positions)
            captured.graph.replay()
            return captured.output.clone()
        with InputLease(self.arena, ids.numel()) as inputs:  # clean: near miss, returned out of the with block
            if inputs is None:
                return self.model(ids, positions)
            inputs.input_ids[:ids.numel()].copy_(ids)
            inputs.positions[:ids.numel()].copy_(positions)
            return self.model(inputs.input_ids, inputs.positions)[:ids.numel()].clone()

    def profile(self, batches: list[int]) -> dict[int, int]:
        peak: dict[int, int] = {}
        for batch in batches:
            inputs = self.arena.checkout(batch)  # leak: the handled OOM breaks out with the inputs still out
            if inputs is None:
                continue
            try:
                self.model(inputs.input_ids, inputs.positions)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                break
            peak[batch] = torch.cuda.max_memory_allocated()
            self.arena.checkin(inputs)
        return peak

    def largest_fitting(self, batches: list[int]) -> int:
        for batch in sorted(batches, reverse=True):
            inputs = self.arena.checkout(batch)  # clean: near miss, break and continue both lie under the finally
            if inputs is None:
                continue
            try:
                self.model(inputs.input_ids, inputs.positions)
                return batch
            except torch.cuda.OutOfMemoryError:
                continue
            finally:
                self.arena.checkin(inputs)
        return 0

    def try_capture(self, batch: int) -> bool:
        scope = CaptureScope(self.arena, batch)
        with scope as inputs:
            if inputs is not None:
                self.model(inputs.input_ids, inputs.positions)
        return scope.error is None
