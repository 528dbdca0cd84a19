"""Workspaces for captured CUDA graphs, bucketed by batch size."""
from __future__ import annotations

import bisect
import logging
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32)


class Workspace:
    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self.static_in: list[int] = [0] * bucket
        self.static_out: list[int] = [0] * bucket


class WorkspaceArena:
    def __init__(self, per_bucket: int) -> None:
        self._idle = {b: [Workspace(b) for _ in range(per_bucket)] for b in BUCKETS}
        self.outstanding = 0

    def reserve(self, bucket: int) -> Optional[Workspace]:
        idle = self._idle[bucket]
        if not idle:
            return None
        self.outstanding += 1
        return idle.pop()

    def unreserve(self, ws: Workspace) -> None:
        self.outstanding -= 1
        self._idle[ws.bucket].append(ws)


def bucket_for(n: int) -> Optional[int]:
    i = bisect.bisect_left(BUCKETS, n)
    return BUCKETS[i] if i < len(BUCKETS) else None


class Graph:
    def __init__(self, ws: Workspace, fn: Callable[[int], int]) -> None:
        self.ws = ws
        self.fn = fn
        self.valid = True

    def replay(self) -> list[int]:
        for i, v in enumerate(self.ws.static_in):
            self.ws.static_out[i] = self.fn(v)
        return self.ws.static_out


class CaptureScope:
    """Workspace for the span of one capture; `keep()` passes it on to the graph."""

    def __init__(self, arena: WorkspaceArena, bucket: int) -> None:
        self.arena = arena
        self.bucket = bucket
        self.ws: Optional[Workspace] = None
        self._kept = False

    def keep(self) -> Workspace:
        self._kept = True
        return self.ws

    def __enter__(self) -> "CaptureScope":
        self.ws = self.arena.reserve(self.bucket)  # clean: near miss, __exit__ returns early only when keep() moved it on
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._kept or self.ws is None:
            return
        self.arena.unreserve(self.ws)
        self.ws = None


class ReplayScope:
    def __init__(self, arena: WorkspaceArena, n: int, profile: bool = False) -> None:
        self.arena = arena
        self.n = n
        self.profile = profile
        self.ws: Optional[Workspace] = None
        self.marks: list[str] = []

    def __enter__(self) -> Optional[Workspace]:
        bucket = bucket_for(self.n)
        if bucket is not None:
            self.ws = self.arena.reserve(bucket)  # leak: __exit__ returns after the profile marks without unreserve
        return self.ws

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> None:
        if self.ws is None:
            return
        if self.profile:
            self.marks.append(f"replay n={self.n}")
            return
        self.arena.unreserve(self.ws)


@contextmanager
def workspace(arena: WorkspaceArena, bucket: int) -> Iterator[Optional[Workspace]]:
    ws = arena.reserve(bucket)  # clean: None check and finally
    if ws is None:
        yield None
        return
    try:
        yield ws
    finally:
        arena.unreserve(ws)


@contextmanager
def workspace_quiet(arena: WorkspaceArena, bucket: int) -> Iterator[Optional[Workspace]]:
    """Like `workspace`, but a failed body is logged and does not propagate."""
    ws = arena.reserve(bucket)  # leak: a body that raises is logged and the unreserve skipped
    try:
        yield ws
        if ws is not None:
            arena.unreserve(ws)
    except RuntimeError as e:
        log.error("graph body failed: %s", e)


class GraphRunner:
    def __init__(self, arena: WorkspaceArena, fn: Callable[[int], int]) -> None:
        self.arena = arena
        self.fn = fn
        self.graphs: dict[int, Graph] = {}
        self.misses = 0

    def capture(self, bucket: int) -> bool:
        if bucket in self.graphs:
            return True
        with CaptureScope(self.arena, bucket) as scope:  # clean: given back by the scope or kept by the graph
            if scope.ws is None:
                return False
            self.fn(0)
            self.graphs[bucket] = Graph(scope.keep(), self.fn)
        return True

    def recapture(self, bucket: int) -> bool:
        ws = self.arena.reserve(bucket)  # clean: near miss, the replaced graph's workspace goes back first
        if ws is None:
            return False
        old = self.graphs.pop(bucket, None)
        if old is not None:
            self.arena.unreserve(old.ws)
        self.graphs[bucket] = Graph(ws, self.fn)
        return True

    def run_eager(self, ids: list[int]) -> list[int]:
        bucket = bucket_for(len(ids))
        if bucket is None:
            return [self.fn(i) for i in ids]
        with workspace(self.arena, bucket) as ws:  # clean: context manager
            if ws is None:
                return [self.fn(i) for i in ids]
            ws.static_in[:len(ids)] = ids
            return [self.fn(i) for i in ws.static_in[:len(ids)]]

    def run_padded(self, ids: list[int], graph_ok: bool) -> list[int]:
        bucket = bucket_for(len(ids))
        ws = self.arena.reserve(bucket) if bucket is not None else None  # leak: a batch without a valid graph is computed eagerly and returned past the unreserve
        if ws is None:
            self.misses += 1
            return [self.fn(i) for i in ids]
        g = self.graphs.get(bucket)
        if not graph_ok or g is None:
            self.misses += 1
            return [self.fn(i) for i in ids]
        ws.static_in[:len(ids)] = ids
        out = [self.fn(i) for i in ws.static_in]
        self.arena.unreserve(ws)
        return out[:len(ids)]

    def largest_free(self, n: int) -> Optional[Workspace]:
        """Try the fitting bucket, then larger ones. The caller gives the workspace back."""
        for b in BUCKETS:
            if b < n:
                continue
            ws = self.arena.reserve(b)  # clean: near miss, rebinding in the loop happens only after a None
            if ws is not None:
                return ws
        return None

    def profile_once(self, n: int) -> int:
        with ReplayScope(self.arena, n, profile=False) as ws:  # clean: near miss, the scope gives it back as profiling is off here
            return 0 if ws is None else ws.bucket

    def probe(self, n: int) -> bool:
        return self.largest_free(n) is not None  # leak: only the presence is tested, the workspace is dropped

    def close(self) -> None:
        for g in self.graphs.values():
            self.arena.unreserve(g.ws)
        self.graphs.clear()
