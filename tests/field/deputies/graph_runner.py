"""CUDA graph capture per batch size, with pooled memory handles and static inputs."""
from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any, Callable

import torch

logger = logging.getLogger(__name__)


class CaptureFailed(RuntimeError):
    pass


class HandlePool:
    """Graph memory handles are scarce, so they are recycled."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.live = 0
        self._idle: list[Any] = []

    def take(self) -> Any:
        if self._idle:
            return self._idle.pop()
        if self.live >= self.limit:
            return None
        self.live += 1
        return torch.cuda.graph_pool_handle()

    def give(self, handle: Any) -> None:
        self._idle.append(handle)


class InputArena:
    """Static input regions carved from one tensor, kept by a free list of rows."""

    def __init__(self, rows: int, width: int, device: str = "cuda") -> None:
        self.data = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._free = set(range(rows))

    def carve(self, n: int) -> list[int] | None:
        rows: list[int] = []
        while len(rows) < n:
            if not self._free:
                self._free.update(rows)
                return None
            rows.append(self._free.pop())  # clean: near miss, a partial carve goes back to the free set before None
        return rows

    def carve_aligned(self, n: int, align: int) -> list[int] | None:
        for start in sorted(self._free):
            if start % align == 0 and all(start + i in self._free for i in range(n)):
                rows = list(range(start, start + n))
                self._free.difference_update(rows)
                return rows
        return None

    def restore(self, rows: list[int]) -> None:
        self._free.update(rows)


class CapturedGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, handle: Any, rows: list[int], out: torch.Tensor) -> None:
        self.graph = graph
        self.handle = handle
        self.rows = rows
        self.out = out
        self.mask_rows: list[int] | None = None


class GraphRunner:
    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], handles: HandlePool, arena: InputArena) -> None:
        self.model = model
        self.handles = handles
        self.arena = arena
        self.graphs: dict[int, CapturedGraph] = {}
        self.shared: Any = None

    def _record(self, rows: list[int], handle: Any) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle):
            out = self.model(self.arena.data[rows])
        return CapturedGraph(graph, handle, rows, out)

    def capture(self, batch: int) -> CapturedGraph | None:
        if batch in self.graphs:
            return self.graphs[batch]
        handle = self.handles.take()  # clean: near miss, given back when no rows are left or the capture fails, else kept in graphs
        if handle is None:
            return None
        rows = self.arena.carve(batch)  # leak: the handler of a failed capture gives back the handle and not the rows
        if rows is None:
            self.handles.give(handle)
            return None
        try:
            captured = self._record(rows, handle)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as e:
            logger.warning("capture of batch %d failed: %s", batch, e)
            self.handles.give(handle)
            return None
        self.graphs[batch] = captured
        return captured

    def recapture(self, batch: int) -> bool:
        """Capture again after a weight update."""
        rows = self.arena.carve(batch)  # leak: the old graph of that batch is overwritten without restoring its rows
        if rows is None:
            return False
        old = self.graphs.get(batch)
        handle = old.handle if old is not None else self.handles.take()  # clean: near miss, the old handle goes over to the new graph, a new one is kept with it
        if handle is None:
            self.arena.restore(rows)
            return False
        self.graphs[batch] = self._record(rows, handle)
        return True

    def capture_all(self, batches: list[int]) -> int:
        if self.shared is None:
            self.shared = self.handles.take()  # clean: near miss, one for all, given back by close()
        done = 0
        for batch in sorted(batches, reverse=True):
            if batch in self.graphs:
                continue
            rows = self.arena.carve_aligned(batch, 8)  # clean: near miss, restored on failure, else owned by the graph in the table
            if rows is None:
                break
            try:
                self.graphs[batch] = self._record(rows, self.shared)
            except RuntimeError:
                self.arena.restore(rows)
                continue
            done += 1
        return done

    def attach_mask(self, batch: int) -> bool:
        g = self.graphs[batch]
        if g.mask_rows is None:
            g.mask_rows = self.arena.carve(batch)  # leak: drop() restores rows alone and forgets mask_rows
        return g.mask_rows is not None

    def drop(self, batch: int) -> None:
        g = self.graphs.pop(batch, None)
        if g is None:
            return
        g.graph.reset()
        self.arena.restore(g.rows)
        if g.handle is not None and g.handle is not self.shared:
            self.handles.give(g.handle)

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        g = self.capture(ids.shape[0])  # clean: the graph stays in the table
        if g is None:
            return self.run_eager(ids)
        self.arena.data[g.rows] = ids
        g.graph.replay()
        return g.out

    def run_eager(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.arena.carve(ids.shape[0])  # clean: near miss, restored before the return, None falls back to the plain input
        if rows is None:
            return self.model(ids)
        self.arena.data[rows] = ids
        out = self.model(self.arena.data[rows])
        self.arena.restore(rows)
        return out

    def time_once(self, batch: int, iters: int) -> float | None:
        with ExitStack() as stack:
            rows = self.arena.carve(batch)  # clean: near miss, restored by the exit stack
            if rows is None:
                return None
            stack.callback(self.arena.restore, rows)
            handle = self.handles.take()  # leak: put on no stack and given back by nobody
            if handle is None:
                return None
            g = self._record(rows, handle)
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            for _ in range(iters):
                g.graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / iters

    def largest_fit(self, candidates: list[int]) -> int:
        for n in sorted(candidates, reverse=True):
            rows = self.arena.carve(n)  # leak: returns the size and keeps the rows that proved it
            if rows is not None:
                return n
        return 0

    def close(self) -> None:
        for batch in list(self.graphs):
            self.drop(batch)
        if self.shared is not None:
            self.handles.give(self.shared)
            self.shared = None
