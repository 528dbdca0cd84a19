from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable

import torch


@dataclass(eq=False)
class StaticInput:
    batch: int
    ids: torch.Tensor
    positions: torch.Tensor


class StaticInputPool:
    """Fixed-address inputs for captured graphs, one list per batch size."""

    def __init__(self, sizes: list[int], copies: int) -> None:
        self.sizes = sorted(sizes)
        self._idle: dict[int, list[StaticInput]] = {}
        for b in self.sizes:
            self._idle[b] = [
                StaticInput(b, torch.zeros(b, dtype=torch.int64, device="cuda"), torch.zeros(b, dtype=torch.int64, device="cuda"))
                for _ in range(copies)
            ]

    def padded(self, n: int) -> int | None:
        i = bisect.bisect_left(self.sizes, n)
        return self.sizes[i] if i < len(self.sizes) else None

    def obtain(self, n: int) -> StaticInput | None:
        b = self.padded(n)
        if b is None or not self._idle[b]:
            return None
        return self._idle[b].pop()

    def yield_back(self, inp: StaticInput) -> None:
        self._idle[inp.batch].append(inp)

    def obtain_largest(self) -> StaticInput | None:
        best: StaticInput | None = None
        for b in reversed(self.sizes):
            if self._idle[b]:
                best = self._idle[b].pop()  # clean: near miss, the break makes it one only, and it is returned
                break
        return best

    def obtain_up_to(self, n: int) -> list[StaticInput]:
        out: list[StaticInput] = []
        left = n
        for b in reversed(self.sizes):
            while left > 0 and self._idle[b]:
                inp = self._idle[b].pop()  # leak: one that is larger than what is left is popped and not kept
                if inp.batch > left:
                    break
                out.append(inp)
                left -= inp.batch
        return out


class GraphMemory:
    """Hands out private memory pool ids and counts the graphs that live in them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._users: dict[int, int] = {}

    def open(self, shared: int | None = None) -> int | None:
        if shared is not None and shared in self._users:
            self._users[shared] += 1
            return shared
        if len(self._users) >= self.limit:
            return None
        handle = max(self._users, default=0) + 1
        self._users[handle] = 1
        return handle

    def close(self, handle: int) -> None:
        self._users[handle] -= 1
        if self._users[handle] == 0:
            del self._users[handle]


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    inp: StaticInput
    out: torch.Tensor
    mem: int


class GraphRunner:
    def __init__(self, model: Callable[..., torch.Tensor], inputs: StaticInputPool, memory: GraphMemory, keep: int) -> None:
        self.model = model
        self.inputs = inputs
        self.memory = memory
        self.keep = keep
        self._graphs: OrderedDict[int, Captured] = OrderedDict()
        self._shared: int | None = None

    def _capture(self, n: int) -> Captured | None:
        inp = self.inputs.obtain(n)  # clean: near miss, yielded back when there is no memory or the capture fails
        if inp is None:
            return None
        mem = self.memory.open(self._shared)  # leak: a failed capture gives back the input only
        if mem is None:
            self.inputs.yield_back(inp)
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                out = self.model(inp.ids, inp.positions)
        except torch.cuda.OutOfMemoryError:
            self.inputs.yield_back(inp)
            return None
        self._shared = mem
        return Captured(graph, inp, out, mem)

    def _retire(self, cap: Captured) -> None:
        cap.graph.reset()
        self.inputs.yield_back(cap.inp)
        self.memory.close(cap.mem)

    def graph_for(self, n: int) -> Captured | None:
        b = self.inputs.padded(n)
        if b is None:
            return None
        cap = self._graphs.get(b)
        if cap is None:
            cap = self._capture(b)  # clean: near miss, kept in _graphs and retired from there
            if cap is None:
                return None
            self._graphs[b] = cap
            while len(self._graphs) > self.keep:
                _, old = self._graphs.popitem(last=False)
                self._retire(old)
        else:
            self._graphs.move_to_end(b)
        return cap

    def recapture(self, n: int) -> bool:
        b = self.inputs.padded(n)
        if b is None:
            return False
        cap = self._capture(b)  # leak: the graph recorded before for this size is overwritten and not retired
        if cap is None:
            return False
        self._graphs[b] = cap
        return True

    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        n = ids.numel()
        cap = self.graph_for(n)
        if cap is not None:
            cap.inp.ids[:n].copy_(ids)
            cap.inp.positions[:n].copy_(positions)
            cap.graph.replay()
            return cap.out[:n].clone()
        inp = self.inputs.obtain(n)  # clean: near miss, yielded back before the eager result is returned
        if inp is None:
            return self.model(ids, positions)
        inp.ids[:n].copy_(ids)
        inp.positions[:n].copy_(positions)
        out = self.model(inp.ids, inp.positions)[:n].clone()
        self.inputs.yield_back(inp)
        return out

    def profile(self, rounds: int) -> int:
        peak = 0
        inp = self.inputs.obtain_largest()  # leak: zero rounds return before the input goes back
        if inp is None:
            return peak
        if rounds <= 0:
            return peak
        for _ in range(rounds):
            self.model(inp.ids, inp.positions)
            peak = max(peak, torch.cuda.max_memory_allocated())
        self.inputs.yield_back(inp)
        return peak

    def split_eager(self, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        outs: list[torch.Tensor] = []
        at = 0
        parts = self.inputs.obtain_up_to(ids.numel())  # clean: near miss, each is yielded back in the loop, empty slices too
        for inp in parts:
            chunk = ids[at : at + inp.batch]
            if chunk.numel():
                inp.ids[: chunk.numel()].copy_(chunk)
                inp.positions[: chunk.numel()].copy_(positions[at : at + inp.batch])
                outs.append(self.model(inp.ids, inp.positions)[: chunk.numel()].clone())
            at += inp.batch
            self.inputs.yield_back(inp)
        return outs

    def clear(self) -> None:
        while self._graphs:
            _, cap = self._graphs.popitem()
            self._retire(cap)
        self._shared = None
