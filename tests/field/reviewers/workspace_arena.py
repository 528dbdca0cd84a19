"""Attention workspaces: a size-bucketed arena, RAII handles and kernels' launchers."""
from __future__ import annotations

import torch


class WorkspaceArena:
    def __init__(self, buckets: dict[int, int]):
        self._shelves = {
            size: [torch.empty(size) for _ in range(n)] for size, n in sorted(buckets.items())
        }

    def get(self, size: int) -> torch.Tensor | None:
        for bucket, shelf in self._shelves.items():
            if bucket >= size and shelf:
                return shelf.pop()  # clean: the workspace is returned
        return None

    def put(self, ws: torch.Tensor) -> None:
        self._shelves[ws.numel()].append(ws)

    def get_zeroed(self, size: int) -> torch.Tensor | None:
        ws = self.get(size)  # clean: near miss, zero_() works in place and returns the same workspace
        return None if ws is None else ws.zero_()

    def get_half(self, size: int) -> torch.Tensor | None:
        ws = self.get(size)  # leak: half() makes a new tensor and the workspace itself is lost
        return None if ws is None else ws.half()


class ScopedWorkspace:
    """`with ScopedWorkspace(arena, n) as ws:`"""

    def __init__(self, arena: WorkspaceArena, size: int):
        self.arena = arena
        self.size = size
        self.ws: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor | None:
        self.ws = self.arena.get(self.size)  # clean: put back by __exit__ on every path
        return self.ws

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.ws is not None:
            self.arena.put(self.ws)
            self.ws = None
        return False


class TimedWorkspace:
    def __init__(self, arena: WorkspaceArena, size: int, stats: dict[str, int] | None = None):
        self.arena = arena
        self.size = size
        self.stats = stats
        self.ws: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor | None:
        self.ws = self.arena.get(self.size)  # leak: __exit__ returns early when no stats are wanted
        return self.ws

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.stats is None:
            return False
        self.stats["uses"] = self.stats.get("uses", 0) + 1
        if self.ws is not None:
            self.arena.put(self.ws)
        self.ws = None
        return False


class SplitKVLauncher:
    def __init__(self, arena: WorkspaceArena):
        self.arena = arena
        self.lse: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None
        self.plan_size = 0

    def plan(self, size: int) -> bool:
        if self.lse is not None and self.plan_size >= size:
            return True
        self.release_plan()
        lse = self.arena.get(size)  # clean: stored in self.lse, put back by release_plan()
        if lse is None:
            return False
        partial = self.arena.get(size * 2)  # clean: stored in self.partial, put back by release_plan()
        if partial is None:
            self.arena.put(lse)
            return False
        self.lse, self.partial, self.plan_size = lse, partial, size
        return True

    def release_plan(self) -> None:
        if self.lse is not None:
            self.arena.put(self.lse)
            self.lse = None
        if self.partial is not None:
            self.arena.put(self.partial)
            self.partial = None

    def replan(self, size: int) -> bool:
        if self.plan_size >= size:
            return True
        self.lse = self.arena.get(size)  # leak: replaces the planned lse workspace without putting it back
        self.plan_size = size
        return self.lse is not None

    def run(self, q: torch.Tensor, splits: int) -> torch.Tensor:
        if splits == 1:
            return q * 2
        tmp = self.arena.get(q.numel() * splits)  # clean: near miss, the early return comes before the get
        if tmp is None:
            return q * 2
        view = tmp[: q.numel() * splits].view(splits, -1)
        view.copy_(q.reshape(1, -1).expand(splits, -1))
        out = view.sum(0).view_as(q)
        self.arena.put(tmp)
        return out

    def run_maybe(self, q: torch.Tensor, splits: int) -> torch.Tensor:
        tmp = None
        if splits > 1:
            tmp = self.arena.get(q.numel())  # clean: near miss, the put is guarded by the same fact
        out = q * 2 if tmp is None else tmp[: q.numel()].copy_(q.reshape(-1)).clone()
        if tmp is not None:
            self.arena.put(tmp)
        return out

    def run_split(self, q: torch.Tensor, splits: int) -> torch.Tensor:
        tmp = self.arena.get(q.numel())  # leak: put back only for more than two splits
        if tmp is None:
            return q
        tmp[: q.numel()].copy_(q.reshape(-1))
        out = tmp[: q.numel()].clone().mul_(splits)
        if splits > 2:
            self.arena.put(tmp)
        return out

    def autotune(self, sizes: list[int]) -> int:
        best = 0
        for size in sizes:
            ws = self.arena.get_zeroed(size)  # clean: put back before the break test
            if ws is None:
                continue
            used = ws.numel()
            self.arena.put(ws)
            if used > 1 << 20:
                break
            best = max(best, used)
        return best

    def warm(self, size: int) -> float:
        ws = self.arena.get_zeroed(size)  # leak: the name is rebound to a view's sum and the workspace is gone
        if ws is None:
            return 0.0
        ws = ws[:size].sum()
        return float(ws)
