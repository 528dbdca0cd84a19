"""Symmetric-memory workspaces for custom all-reduce and quantised all-gather."""
from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Callable, Iterator, Optional, Type

try:
    import torch
except ImportError:
    torch = None


class Workspace:
    def __init__(self, rank: int, index: int, numel: int) -> None:
        self.rank = rank
        self.index = index
        self.numel = numel
        self.data: Any = torch.zeros(numel) if torch is not None else [0.0] * numel

    def fill(self, values: list[float]) -> None:
        for i, v in enumerate(values):
            self.data[i] = v

    def clone(self, n: int) -> list[float]:
        return [float(x) for x in self.data[:n]]


class WorkspacePool:
    """A ring of equal workspaces; busy flags rather than a free list."""

    def __init__(self, rank: int, depth: int, numel: int) -> None:
        self._ring = [Workspace(rank, i, numel) for i in range(depth)]
        self._busy = [False] * depth
        self._cursor = 0
        self._cond = threading.Condition()
        self.numel = numel

    def borrow(self, timeout: Optional[float] = None) -> Optional[Workspace]:
        with self._cond:
            if not self._cond.wait_for(lambda: not all(self._busy), timeout):
                return None
            while self._busy[self._cursor]:
                self._cursor = (self._cursor + 1) % len(self._ring)
            self._busy[self._cursor] = True
            return self._ring[self._cursor]

    def give_back(self, ws: Workspace) -> None:
        with self._cond:
            self._busy[ws.index] = False
            self._cond.notify()

    @contextmanager
    def scoped(self) -> Iterator[Workspace]:
        ws = self.borrow()  # clean: the finally gives it back
        assert ws is not None
        try:
            yield ws
        finally:
            self.give_back(ws)

    @contextmanager
    def maybe(self, wanted: bool) -> Iterator[Optional[Workspace]]:
        ws = self.borrow(0.0) if wanted else None  # clean: near miss, given back whenever it is not None
        try:
            yield ws
        finally:
            if ws is not None:
                self.give_back(ws)


class AllReduceSession:
    def __init__(self, pool: WorkspacePool) -> None:
        self.pool = pool
        self.ws: Optional[Workspace] = None
        self.steps = 0

    def __enter__(self) -> "AllReduceSession":
        self.ws = self.pool.borrow()  # leak: __exit__ returns early for a session that took no step
        return self

    def __exit__(self, tp: Optional[Type[BaseException]], ev: Optional[BaseException],
                 tb: Optional[TracebackType]) -> bool:
        if self.steps == 0:
            return False
        if self.ws is not None:
            self.pool.give_back(self.ws)
            self.ws = None
        return False

    def reduce(self, values: list[float]) -> list[float]:
        assert self.ws is not None
        self.steps += 1
        self.ws.fill(values)
        return self.ws.clone(len(values))


class GatherSession:
    def __init__(self, pool: WorkspacePool, log: Callable[[str], None]) -> None:
        self.pool = pool
        self.log = log
        self._held: list[Workspace] = []

    def __enter__(self) -> "GatherSession":
        first = self.pool.borrow()  # clean: in the held list, __exit__ returns the whole list
        assert first is not None
        self._held.append(first)
        return self

    def extra(self) -> Optional[Workspace]:
        ws = self.pool.borrow(0.1)  # clean: in the held list
        if ws is not None:
            self._held.append(ws)
        return ws

    def __exit__(self, tp: Any, ev: Any, tb: Any) -> bool:
        while self._held:
            self.pool.give_back(self._held.pop())
        if tp is None:
            return False
        self.log(f"gather failed: {ev!r}")
        return issubclass(tp, TimeoutError)


class Communicator:
    def __init__(self, pool: WorkspacePool, world_size: int) -> None:
        self.pool = pool
        self.world_size = world_size

    def _pack(self, values: list[float]) -> Workspace:
        ws = self.pool.borrow()  # clean: filled and returned
        assert ws is not None
        ws.fill(values)
        return ws

    def _pack_or_none(self, values: list[float]) -> Optional[Workspace]:
        if len(values) > self.pool.numel:
            return None
        return self._pack(values)  # clean: handed on

    def all_reduce(self, values: list[float]) -> list[float]:
        if self.world_size == 1:
            return values
        with self.pool.scoped() as ws:  # clean: with statement
            ws.fill(values)
            return [v * self.world_size for v in ws.clone(len(values))]

    def all_gather(self, values: list[float]) -> list[float]:
        packed = self._pack(values)  # leak: cloned and dropped
        out = packed.clone(len(values))
        return out * self.world_size

    def reduce_scatter(self, values: list[float]) -> list[float]:
        packed = self._pack_or_none(values)  # clean: given back before the slice is returned
        if packed is None:
            return values
        shard = len(values) // self.world_size
        out = packed.clone(len(values))[:shard]
        self.pool.give_back(packed)
        return out

    def broadcast(self, values: list[float], root: bool) -> list[float]:
        packed = self._pack_or_none(values)  # leak: given back by the root only
        if packed is None:
            return values
        out = packed.clone(len(values))
        if root:
            self.pool.give_back(packed)
        return out

    def quantised(self, values: list[float], scale: float) -> list[float]:
        with self.pool.maybe(scale != 1.0) as ws:  # clean: with statement
            if ws is None:
                return values
            ws.fill([v / scale for v in values])
            return ws.clone(len(values))

    def ping_pong(self, values: list[float], rounds: int) -> list[float]:
        cur = self._pack(values)  # clean: swapped each round, the last one goes back after the loop
        for _ in range(rounds):
            nxt = self._pack(cur.clone(len(values)))  # clean: near miss, becomes cur after cur went back
            self.pool.give_back(cur)
            cur = nxt
        out = cur.clone(len(values))
        self.pool.give_back(cur)
        return out

    def pipelined(self, chunks: list[list[float]]) -> list[float]:
        out: list[float] = []
        prev: Optional[Workspace] = None
        for chunk in chunks:
            ws = self._pack(chunk)  # leak: the last chunk's workspace stays in prev after the loop
            if prev is not None:
                out.extend(prev.clone(len(chunk)))
                self.pool.give_back(prev)
            prev = ws
        return out

    def all_to_all(self, parts: list[list[float]]) -> list[list[float]]:
        with ExitStack() as stack:
            spaces: list[Workspace] = []
            for part in parts:
                ws = self._pack(part)  # clean: near miss, the exit stack gives it back
                stack.callback(self.pool.give_back, ws)
                spaces.append(ws)
            return [s.clone(len(p)) for s, p in zip(spaces, parts)]

    def reduce_twice(self, values: list[float]) -> list[float]:
        with AllReduceSession(self.pool) as session:  # clean: with statement, this one always takes steps
            return session.reduce(session.reduce(values))

    def gather_wide(self, values: list[float]) -> int:
        with GatherSession(self.pool, print) as session:  # clean: with statement
            ws = session.extra()  # clean: the session returns it
            if ws is None:
                return 0
            ws.fill(values)
            return ws.index
