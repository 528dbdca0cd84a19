"""Workspace objects that own several tensors and are closed as a whole."""
from __future__ import annotations

from typing import Self

import torch


class WorkspaceHeap:
    def __init__(self) -> None:
        self._bins: dict[int, list[torch.Tensor]] = {}
        self.live = 0

    def malloc(self, numel: int) -> torch.Tensor:
        self.live += 1
        spare = self._bins.get(numel)
        return spare.pop() if spare else torch.empty(numel)

    def mfree(self, t: torch.Tensor) -> None:
        self.live -= 1
        self._bins.setdefault(t.numel(), []).append(t)


class Workspace:
    def __init__(self, heap: WorkspaceHeap, numel: int) -> None:
        self.heap = heap
        self.qkv = heap.malloc(3 * numel)  # clean: near miss, freed in close
        self.out = heap.malloc(numel)  # clean: near miss, freed in close
        self.lse: torch.Tensor | None = None

    def need_lse(self, rows: int) -> torch.Tensor:
        if self.lse is None:
            self.lse = self.heap.malloc(rows)  # clean: near miss, lazily made, freed in close when there
        return self.lse

    def close(self) -> None:
        self.heap.mfree(self.qkv)
        self.heap.mfree(self.out)
        if self.lse is not None:
            self.heap.mfree(self.lse)
            self.lse = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class BackwardWorkspace:
    def __init__(self, heap: WorkspaceHeap, numel: int) -> None:
        self.heap = heap
        self.grad = heap.malloc(numel)  # clean: freed in __exit__
        self.delta = heap.malloc(numel)  # leak: no method frees it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.heap.mfree(self.grad)


class GradBucket:
    def __init__(self, heap: WorkspaceHeap) -> None:
        self.heap = heap
        self.flat: torch.Tensor | None = None

    def ensure(self, numel: int) -> torch.Tensor:
        if self.flat is None or self.flat.numel() < numel:
            self.flat = self.heap.malloc(numel)  # leak: growing replaces the smaller one without freeing it
        return self.flat

    def close(self) -> None:
        if self.flat is not None:
            self.heap.mfree(self.flat)
            self.flat = None


def forward(heap: WorkspaceHeap, x: torch.Tensor) -> torch.Tensor:
    with Workspace(heap, x.numel()) as ws:
        ws.out.copy_(x.view(-1))
        return ws.out.clone()


def backward(heap: WorkspaceHeap, g: torch.Tensor) -> float:
    with BackwardWorkspace(heap, g.numel()) as ws:
        ws.grad.copy_(g.view(-1))
        return float(ws.grad.sum())


def bucketed(heap: WorkspaceHeap, grads: list[torch.Tensor]) -> float:
    bucket = GradBucket(heap)
    total = 0.0
    for g in grads:
        flat = bucket.ensure(g.numel())
        flat[: g.numel()].copy_(g.view(-1))
        total += float(flat[: g.numel()].sum())
    bucket.close()
    return total
