"""Capture and replay of decode steps with static input sets."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Callable

import torch

logger = logging.getLogger(__name__)

CAPTURE_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass
class StaticInputs:
    size: int
    tokens: torch.Tensor
    positions: torch.Tensor


class InputSetPool:
    def __init__(self, per_size: int = 2):
        self._sets: dict[int, list[StaticInputs]] = {
            s: [
                StaticInputs(s, torch.zeros(s, dtype=torch.long), torch.zeros(s, dtype=torch.long))
                for _ in range(per_size)
            ]
            for s in CAPTURE_SIZES
        }

    def lease(self, size: int) -> StaticInputs | None:
        stack = self._sets.get(size)
        return stack.pop() if stack else None

    def unlease(self, inputs: StaticInputs) -> None:
        self._sets[inputs.size].append(inputs)

    def lease_at_least(self, size: int) -> StaticInputs | None:
        for s in CAPTURE_SIZES:
            if s < size:
                continue
            got = self.lease(s)  # clean: first hit is returned to the caller
            if got is not None:
                return got
        return None

    def lease_exact(self, size: int) -> StaticInputs | None:
        stack = self._sets.get(size)
        while stack:
            inputs = stack.pop()  # leak: a set whose tensor was resized is popped and forgotten
            if inputs.tokens.numel() == size:
                return inputs
        return None


class GraphHandle:
    def __init__(self, inputs: StaticInputs, fn: Callable[[StaticInputs], torch.Tensor]):
        self.inputs = inputs
        self.fn = fn

    def replay(self) -> torch.Tensor:
        return self.fn(self.inputs)


class GraphRunner:
    def __init__(self, model: Callable[..., torch.Tensor], pool: InputSetPool, enable_graphs: bool = True):
        self.model = model
        self.pool = pool
        self.enable_graphs = enable_graphs
        self.graphs: dict[int, GraphHandle] = {}
        self.piecewise: dict[int, StaticInputs] = {}

    def _forward(self, inputs: StaticInputs) -> torch.Tensor:
        return self.model(inputs.tokens, inputs.positions)

    def capture(self, size: int) -> bool:
        if size in self.graphs:
            return True
        inputs = self.pool.lease(size)  # clean: kept by the handle in graphs, reset() gives it back
        if inputs is None:
            return False
        self.graphs[size] = GraphHandle(inputs, self._forward)
        return True

    def reset(self) -> None:
        for handle in self.graphs.values():
            self.pool.unlease(handle.inputs)
        self.graphs.clear()

    def capture_piecewise(self, size: int) -> None:
        inputs = self.pool.lease(size)  # leak: drop_piecewise deletes the entries without unlease
        if inputs is not None:
            self.piecewise[size] = inputs

    def drop_piecewise(self) -> None:
        for size in list(self.piecewise):
            del self.piecewise[size]

    def run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        n = tokens.numel()
        inputs = None
        if self.enable_graphs:
            inputs = self.pool.lease_at_least(n)  # clean: near miss, None when disabled or exhausted, else unleased
        if inputs is None:
            return self.model(tokens, positions)
        inputs.tokens[:n].copy_(tokens)
        inputs.positions[:n].copy_(positions)
        out = self._forward(inputs)[:n].clone()
        self.pool.unlease(inputs)
        return out

    def run_padded(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        n = tokens.numel()
        inputs = self.pool.lease_at_least(n)  # leak: falls back to eager mode with a leased set when graphs are off
        if inputs is None or not self.enable_graphs:
            return self.model(tokens, positions)
        inputs.tokens[:n].copy_(tokens)
        inputs.positions[:n].copy_(positions)
        out = self._forward(inputs)[:n].clone()
        self.pool.unlease(inputs)
        return out

    def benchmark(self, iters: int) -> dict[int, float]:
        report: dict[int, float] = {}
        for size in CAPTURE_SIZES:
            inputs = self.pool.lease(size)  # clean: near miss, continue is taken only for None
            if inputs is None:
                continue
            acc = 0.0
            for _ in range(iters):
                acc += float(self._forward(inputs).sum())
            report[size] = acc / iters
            self.pool.unlease(inputs)
        return report

    def find_fast(self, limit: float) -> int | None:
        for size in CAPTURE_SIZES:
            inputs = self.pool.lease(size)  # leak: returning the size found leaves its set out
            if inputs is None:
                continue
            if float(self._forward(inputs).sum()) < limit:
                return size
            self.pool.unlease(inputs)
        return None

    def warmup(self, sizes: list[int]) -> None:
        held: list[Any] = []
        for s in sizes:
            held.append(self.pool.lease(s))  # clean: near miss, None entries are skipped, the rest unleased
        for inputs in held:
            if inputs is not None:
                self._forward(inputs)
                self.pool.unlease(inputs)

    def precheck(self, size: int) -> bool:
        return bool(self.pool.lease(size))  # leak: result only turned into a bool
