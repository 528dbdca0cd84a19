"""Split-KV attention: workspaces for partial outputs and log-sum-exp rows."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional, Sequence

try:
    import torch
except ImportError:
    torch = None


def _zeros(n: int):
    if torch is not None:
        return torch.zeros(n, dtype=torch.float32)
    return [0.0] * n


class Workspace:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.view = _zeros(numel)


class WorkspaceManager:
    """Buckets of power-of-two workspaces, bounded in total."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._cached: dict[int, list[Workspace]] = {}

    @staticmethod
    def bucket(numel: int) -> int:
        return 1 << max(4, math.ceil(math.log2(max(1, numel))))

    def acquire(self, numel: int) -> Optional[Workspace]:
        size = self.bucket(numel)
        if self.in_use + size > self.limit:
            return None
        self.in_use += size
        cached = self._cached.get(size)
        if cached:
            return cached.pop()
        return Workspace(size)

    def release(self, ws: Workspace) -> None:
        self.in_use -= ws.numel
        self._cached.setdefault(ws.numel, []).append(ws)


@dataclass
class Plan:
    splits: int
    heads: int
    dim: int
    partial: Optional[Workspace] = None
    lse: Optional[Workspace] = None


class SplitKVRunner:
    def __init__(self, mgr: WorkspaceManager) -> None:
        self.mgr = mgr

    def plan(self, splits: int, heads: int, dim: int) -> Optional[Plan]:
        partial = self.mgr.acquire(splits * heads * dim)  # leak: a missing lse workspace returns without releasing this one
        if partial is None:
            return None
        lse = self.mgr.acquire(splits * heads)  # clean: moved into the plan
        if lse is None:
            return None
        return Plan(splits, heads, dim, partial, lse)

    def plan_shrinking(self, splits: int, heads: int, dim: int) -> Optional[Plan]:
        """Halve the splits until both workspaces fit."""
        while splits >= 1:
            partial = self.mgr.acquire(splits * heads * dim)  # clean: near miss, released before the splits are halved
            if partial is not None:
                lse = self.mgr.acquire(splits * heads)  # clean: moved into the plan
                if lse is not None:
                    return Plan(splits, heads, dim, partial, lse)
                self.mgr.release(partial)
            splits //= 2
        return None

    def finish(self, plan: Plan) -> None:
        for ws in (plan.partial, plan.lse):
            if ws is not None:
                self.mgr.release(ws)
        plan.partial = plan.lse = None

    def run(self, q: Sequence[float], keys: Sequence[float], heads: int) -> list[float]:
        plan = self.plan_shrinking(4, heads, len(q))  # clean: finished before the return
        if plan is None:
            return list(q)
        assert plan.partial is not None
        out = [x * sum(keys) / max(1, len(keys)) for x in q]
        for i, x in enumerate(out):
            plan.partial.view[i] = x
        self.finish(plan)
        return out

    def estimate(self, heads: int, dim: int) -> int:
        plan = self.plan(8, heads, dim)  # leak: only the split count is read
        return plan.splits if plan is not None else 1

    def run_many(self, batches: Sequence[Sequence[float]], heads: int) -> list[int]:
        sizes: list[int] = []
        for q in batches:
            plan = self.plan(2, heads, max(1, len(q)))  # leak: an empty batch continues with the plan unfinished
            if plan is None:
                break
            if not q:
                sizes.append(0)
                continue
            sizes.append(plan.splits * len(q))
            self.finish(plan)
        return sizes


class DecodeGraph:
    """Captured decode step; the workspace has to outlive the graph."""

    def __init__(self, mgr: WorkspaceManager) -> None:
        self.mgr = mgr
        self.ws: Optional[Workspace] = None
        self.batch = 0

    def capture(self, batch: int, dim: int) -> bool:
        if self.ws is not None and batch <= self.batch:
            return True
        self.ws = self.mgr.acquire(batch * dim)  # leak: a recapture for a bigger batch overwrites the old workspace
        self.batch = batch
        return self.ws is not None

    def destroy(self) -> None:
        if self.ws is not None:
            self.mgr.release(self.ws)
            self.ws = None


class PrefillGraph:
    def __init__(self, mgr: WorkspaceManager) -> None:
        self.mgr = mgr
        self.ws: Optional[Workspace] = None

    def capture(self, tokens: int, dim: int) -> bool:
        if self.ws is not None:
            if self.ws.numel >= tokens * dim:
                return True
            self.mgr.release(self.ws)
        self.ws = self.mgr.acquire(tokens * dim)  # clean: near miss, the smaller one is released before the overwrite
        return self.ws is not None

    def destroy(self) -> None:
        ws, self.ws = self.ws, None
        if ws is not None:
            self.mgr.release(ws)


class LayerWorkspaces:
    def __init__(self, mgr: WorkspaceManager) -> None:
        self.mgr = mgr
        self.by_layer: dict[int, Workspace] = {}

    def of(self, layer: int, numel: int) -> Optional[Workspace]:
        ws = self.by_layer.get(layer)
        if ws is not None and ws.numel >= numel:
            return ws
        fresh = self.mgr.acquire(numel)  # clean: near miss, enters the table in place of the one that is released
        if fresh is None:
            return None
        if ws is not None:
            self.mgr.release(ws)
        self.by_layer[layer] = fresh
        return fresh

    def clear(self) -> None:
        for ws in self.by_layer.values():
            self.mgr.release(ws)
        self.by_layer.clear()


class SinkWorkspaces:
    def __init__(self, mgr: WorkspaceManager) -> None:
        self.mgr = mgr
        self.rows: list[Optional[Workspace]] = []

    def reset(self, layers: int, numel: int) -> None:
        self.rows = [self.mgr.acquire(numel) for _ in range(layers)]  # leak: the next prefill replaces the list with the layers that were not evicted

    def prefill(self, layers: int, numel: int, evicted: Sequence[int]) -> int:
        self.reset(layers, numel)
        for layer in evicted:
            self.release_layer(layer)
        return sum(ws is not None for ws in self.rows)

    def release_layer(self, layer: int) -> None:
        ws = self.rows[layer]
        if ws is not None:
            self.mgr.release(ws)
            self.rows[layer] = None


def merge_states(mgr: WorkspaceManager, parts: Sequence[Sequence[float]]) -> list[float]:
    ws = mgr.acquire(sum(len(p) for p in parts))  # clean: near miss, the unpooled fallback has none to release
    if ws is None:
        return [x for p in parts for x in p]
    pos = 0
    for part in parts:
        for x in part:
            ws.view[pos] = x
            pos += 1
    merged = [float(ws.view[i]) for i in range(pos)]
    mgr.release(ws)
    return merged


def cascade(mgr: WorkspaceManager, levels: Sequence[Sequence[float]]) -> Optional[float]:
    """Each level reads the workspace of the one before."""
    prev: Optional[Workspace] = None
    total = 0.0
    for level in levels:
        cur = mgr.acquire(len(level))  # clean: near miss, becomes prev, which each pass and every way out release
        if cur is None:
            if prev is not None:
                mgr.release(prev)
            return None
        for i, x in enumerate(level):
            cur.view[i] = x
        if prev is not None:
            mgr.release(prev)
        prev = cur
        total += sum(level)
    if prev is not None:
        mgr.release(prev)
    return total


def autotune(mgr: WorkspaceManager, candidates: Sequence[int], cost: Sequence[float]) -> Optional[int]:
    best: Optional[Workspace] = None
    best_cost = math.inf
    for numel, c in zip(candidates, cost):
        ws = mgr.acquire(numel)  # leak: a better candidate rebinds best, a worse one is dropped
        if ws is None:
            continue
        if c < best_cost:
            best, best_cost = ws, c
    if best is None:
        return None
    size = best.numel
    mgr.release(best)
    return size


def main() -> None:
    mgr = WorkspaceManager(4096)
    runner = SplitKVRunner(mgr)
    runner.run([1.0] * 8, [1.0, 2.0], 4)
    graph = PrefillGraph(mgr)
    graph.capture(8, 8)
    graph.capture(16, 8)
    graph.destroy()
    layers = LayerWorkspaces(mgr)
    layers.of(0, 16)  # clean: near miss, the table keeps it
    layers.of(0, 64)  # clean: near miss, the table keeps it
    layers.clear()
    print(merge_states(mgr, [[1.0], [2.0]]), cascade(mgr, [[1.0], [2.0, 3.0]]))
    print("in use", mgr.in_use)


if __name__ == "__main__":
    main()
