"""Workspaces for split-KV attention: partial outputs and log-sum-exp buffers are carved from one arena."""
from __future__ import annotations

import contextlib
import math
from typing import Dict, Iterator, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None


class Workspace:
    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.values: List[float] = [0.0] * size


class WorkspaceArena:
    def __init__(self, capacity: int) -> None:
        self._holes: List[Tuple[int, int]] = [(0, capacity)]
        self.live: Dict[int, Workspace] = {}

    def carve(self, size: int) -> Optional[Workspace]:
        for i, (off, room) in enumerate(self._holes):
            if room >= size:
                if room == size:
                    del self._holes[i]
                else:
                    self._holes[i] = (off + size, room - size)
                ws = Workspace(off, size)
                self.live[off] = ws
                return ws
        return None

    def restore(self, ws: Workspace) -> None:
        del self.live[ws.offset]
        self._holes.append((ws.offset, ws.size))
        self._holes.sort()
        merged: List[Tuple[int, int]] = []
        for off, room in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == off:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((off, room))
        self._holes = merged


class ShapeMismatch(ValueError):
    pass


@contextlib.contextmanager
def partials(arena: WorkspaceArena, size: int) -> Iterator[Workspace]:
    ws = arena.carve(size)  # leak: a body that raises skips restore, and decode() survives its ShapeMismatch
    if ws is None:
        raise MemoryError(size)
    yield ws
    arena.restore(ws)


@contextlib.contextmanager
def lse_buffer(arena: WorkspaceArena, heads: int) -> Iterator[Optional[Workspace]]:
    ws = arena.carve(heads)  # clean: restored in the finally unless there was none
    try:
        yield ws
    finally:
        if ws is not None:
            arena.restore(ws)


def split_workspaces(arena: WorkspaceArena, splits: int, size: int) -> Iterator[Workspace]:
    """One workspace per KV split, valid until the next one is asked for."""
    for _ in range(splits):
        ws = arena.carve(size)  # leak: attend_until leaves its loop early and the suspended generator never restores
        if ws is None:
            return
        yield ws
        arena.restore(ws)


def guarded_workspaces(arena: WorkspaceArena, splits: int, size: int) -> Iterator[Workspace]:
    for _ in range(splits):
        ws = arena.carve(size)  # clean: near miss, closing the generator runs the finally
        if ws is None:
            return
        try:
            yield ws
        finally:
            arena.restore(ws)


class SplitAttention:
    def __init__(self, arena: WorkspaceArena, heads: int = 4) -> None:
        self.arena = arena
        self.heads = heads
        self.cached: Optional[Workspace] = None
        self.scale = 1.0 / math.sqrt(heads)

    def _check(self, q: List[float]) -> None:
        if len(q) % self.heads:
            raise ShapeMismatch(len(q))

    def decode(self, queries: List[List[float]]) -> List[float]:
        out: List[float] = []
        for q in queries:
            try:
                with partials(self.arena, len(q)) as ws:  # clean: used as a context manager
                    self._check(q)
                    ws.values[:] = q
                    out.append(sum(ws.values) * self.scale)
            except ShapeMismatch:
                out.append(float("nan"))
        return out

    def attend_until(self, q: List[float], splits: int, limit: float) -> float:
        acc = 0.0
        for ws in split_workspaces(self.arena, splits, len(q)):  # clean: generator frees, the fault is in its missing finally
            ws.values[:] = q
            acc += sum(ws.values)
            if acc > limit:
                break
        return acc

    def attend(self, q: List[float], splits: int, limit: float) -> float:
        acc = 0.0
        with contextlib.closing(guarded_workspaces(self.arena, splits, len(q))) as pieces:  # clean: closing
            for ws in pieces:
                ws.values[:] = q
                acc += sum(ws.values)
                if acc > limit:
                    return acc
        return acc

    def cached_workspace(self, size: int) -> Optional[Workspace]:
        """Keeps the largest workspace asked for so far."""
        if self.cached is not None and self.cached.size >= size:
            return self.cached
        self.cached = self.arena.carve(size)  # leak: the smaller cached workspace is overwritten
        return self.cached

    def reduce(self, parts: List[List[float]]) -> Optional[List[float]]:
        with contextlib.ExitStack() as stack:
            held: List[Workspace] = []
            for p in parts:
                ws = self.arena.carve(len(p))  # clean: near miss, the exit stack's callback restores it
                if ws is None:
                    return None
                stack.callback(self.arena.restore, ws)
                ws.values[:] = p
                held.append(ws)
            with lse_buffer(self.arena, self.heads) as lse:  # clean: context manager
                if lse is None:
                    return None
            return [sum(col) for col in zip(*(w.values for w in held))]

    def reset(self) -> None:
        if self.cached is not None:
            self.arena.restore(self.cached)
            self.cached = None


def main() -> None:
    arena = WorkspaceArena(64)
    attn = SplitAttention(arena)
    attn.decode([[1.0] * 4, [2.0] * 8])
    attn.attend([1.0] * 4, 3, 5.0)
    attn.attend_until([1.0] * 4, 2, 100.0)
    attn.cached_workspace(8)
    attn.reset()
    assert attn.reduce([[1.0] * 4, [2.0] * 4]) == [3.0] * 4
    assert not arena.live


if __name__ == "__main__":
    main()
