"""CUDA graph capture and replay with pooled workspaces."""
from __future__ import annotations

import logging
from typing import Any, Callable, Optional

logger = logging.getLogger(__name__)


class CaptureError(RuntimeError):
    pass


class Workspace:
    __slots__ = ("size", "storage")

    def __init__(self, size: int) -> None:
        self.size = size
        self.storage: Any = None


class WorkspacePool:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lent = 0
        self._spare: dict[int, list[Workspace]] = {}

    def borrow(self, size: int) -> Workspace:
        bucket = 1 << (size - 1).bit_length()
        self.lent += 1
        spare = self._spare.get(bucket)
        return spare.pop() if spare else Workspace(bucket)

    def give_back(self, ws: Workspace) -> None:
        self.lent -= 1
        self._spare.setdefault(ws.size, []).append(ws)


class GraphEntry:
    def __init__(self, graph: Any, ws: Workspace, batch: int) -> None:
        self.graph = graph
        self.ws = ws
        self.batch = batch


class GraphRunner:
    def __init__(self, pool: WorkspacePool, capture: Callable[[int, Workspace], Any]) -> None:
        self.pool = pool
        self.capture = capture
        self._graphs: dict[int, GraphEntry] = {}
        self._eager_ws: Optional[Workspace] = None

    @staticmethod
    def workspace_size(batch: int) -> int:
        return max(batch, 1) * 4096

    def capture_batch(self, batch: int) -> bool:
        ws = self.pool.borrow(self.workspace_size(batch))  # leak: not given back after a CaptureError
        try:
            graph = self.capture(batch, ws)
        except CaptureError as e:
            logger.warning("batch %d runs eagerly: %s", batch, e)
            return False
        stale = self._graphs.pop(batch, None)
        if stale is not None:
            self.pool.give_back(stale.ws)
        self._graphs[batch] = GraphEntry(graph, ws, batch)
        return True

    def recapture_all(self) -> None:
        """After a weight update. Entries whose capture fails are removed."""
        for batch in list(self._graphs):
            entry = self._graphs.pop(batch)
            try:
                graph = self.capture(batch, entry.ws)
            except CaptureError:
                self.pool.give_back(entry.ws)
                continue
            self._graphs[batch] = GraphEntry(graph, entry.ws, batch)

    def drop(self, batch: int) -> None:
        entry = self._graphs.pop(batch, None)
        if entry is None:
            return
        self.pool.give_back(entry.ws)

    def eager_workspace(self, size: int) -> Workspace:
        if self._eager_ws is None or self._eager_ws.size < size:
            if self._eager_ws is not None:
                self.pool.give_back(self._eager_ws)
            self._eager_ws = self.pool.borrow(size)  # clean: near miss, the smaller one is given back before
        return self._eager_ws

    def run_eager(self, batch: int, fn: Callable[[Workspace], Any], ws: Optional[Workspace] = None) -> Any:
        owned = ws is None
        if owned:
            ws = self.pool.borrow(self.workspace_size(batch))  # clean: near miss, owned decides in finally
        try:
            return fn(ws)
        finally:
            if owned:
                self.pool.give_back(ws)

    def run_chunked(self, sizes: list[int], fn: Callable[[Workspace, int], Any], ws: Optional[Workspace] = None) -> list[Any]:
        owned = ws is None
        if ws is None:
            ws = self.pool.borrow(self.workspace_size(max(sizes, default=1)))  # leak: a regrown workspace replaces it
        outs = []
        for n in sizes:
            need = self.workspace_size(n)
            if ws.size < need or n % 8:
                ws = self.pool.borrow(need * 2)  # leak: lost when the workspace came from the caller, or regrown again
            outs.append(fn(ws, n))
        if owned:
            self.pool.give_back(ws)
        return outs

    def autotune(self, sizes: list[int], bench: Callable[[Workspace], float]) -> Optional[int]:
        best_ws: Optional[Workspace] = None
        best = float("inf")
        for size in sizes:
            ws = self.pool.borrow(size)  # clean: near miss, loser and final best are both given back
            cost = bench(ws)
            if cost >= best:
                self.pool.give_back(ws)
                continue
            if best_ws is not None:
                self.pool.give_back(best_ws)
            best_ws, best = ws, cost
        if best_ws is None:
            return None
        self.pool.give_back(best_ws)
        return best_ws.size

    def split_k(self, batch: int, want_partials: bool, fn: Callable[..., Any]) -> Any:
        acc = self.pool.borrow(self.workspace_size(batch))  # clean: finally
        partial = None
        if want_partials:
            partial = self.pool.borrow(self.workspace_size(batch) * 4)  # clean: near miss, same condition as the give_back
        try:
            return fn(acc, partial)
        finally:
            if want_partials:
                self.pool.give_back(partial)
            self.pool.give_back(acc)

    def split_k_legacy(self, batch: int, splits: int, fn: Callable[..., Any]) -> Any:
        partial = None
        if splits > 1:
            partial = self.pool.borrow(self.workspace_size(batch) * splits)  # leak: two and three splits fall below the bar for give_back
        out = fn(partial, splits)
        if splits >= 4:
            self.pool.give_back(partial)
        return out

    def close(self) -> None:
        for batch in list(self._graphs):
            self.drop(batch)
        if self._eager_ws is not None:
            self.pool.give_back(self._eager_ws)
            self._eager_ws = None


class CascadeAttention:
    """Allocates in plan(), frees in finish(); the flag is fixed for the lifetime of the object."""

    def __init__(self, pool: WorkspacePool, two_level: bool, shared: Optional[Workspace] = None) -> None:
        self.pool = pool
        self.two_level = two_level
        self.shared = shared
        self.lse_ws: Optional[Workspace] = None
        self.out_ws: Optional[Workspace] = None

    def plan(self, n: int) -> None:
        self.finish()
        if self.two_level:
            self.lse_ws = self.pool.borrow(n)  # clean: near miss, finish tests the same flag and None
        if self.shared is None:
            self.out_ws = self.pool.borrow(n * 2)  # leak: finish gives it back under two_level only

    def finish(self) -> None:
        if self.two_level:
            if self.lse_ws is not None:
                self.pool.give_back(self.lse_ws)
                self.lse_ws = None
            if self.out_ws is not None:
                self.pool.give_back(self.out_ws)
                self.out_ws = None


if __name__ == "__main__":
    p = WorkspacePool(1 << 20)
    r = GraphRunner(p, lambda b, ws: object())
    assert r.capture_batch(4) and r.capture_batch(4)
    r.recapture_all()
    assert r.run_eager(2, lambda ws: ws.size) == 8192
    assert r.autotune([64, 32, 128], lambda ws: ws.size) == 32
    r.close()
    assert p.lent == 0, p.lent
