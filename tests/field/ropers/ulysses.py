"""Ulysses sequence parallel attention: all-to-all workspaces keyed by shape."""
from __future__ import annotations

from collections import defaultdict
from typing import Any, Callable, Dict, List, Optional, Tuple

Shape = Tuple[int, int]


class Workspace:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.flat = [0] * (shape[0] * shape[1])


class WorkspaceCache:
    """Keeps workspaces by shape; get() may return None once the byte budget is spent."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._bins: Dict[Shape, List[Workspace]] = defaultdict(list)
        self.live = 0

    def get(self, shape: Shape) -> Optional[Workspace]:
        cost = shape[0] * shape[1]
        if self._bins[shape]:
            self.live += 1
            return self._bins[shape].pop()
        if cost > self.budget:
            return None
        self.budget -= cost
        self.live += 1
        return Workspace(shape)

    def put(self, ws: Workspace) -> None:
        self.live -= 1
        self._bins[ws.shape].append(ws)


def all_to_all(dst: Workspace, src: List[int]) -> None:
    if len(src) > len(dst.flat):
        raise ValueError("source too large")
    dst.flat[:len(src)] = src


class SeqAllToAll:
    def __init__(self, cache: WorkspaceCache, world: int) -> None:
        self.cache = cache
        self.world = world
        self.fallbacks = 0

    def _scatter(self, x: List[int]) -> Optional[Workspace]:
        ws = self.cache.get((self.world, max(len(x), 1)))  # clean: handed to the caller
        if ws is None:
            return None
        all_to_all(ws, x)
        return ws

    def scatter_heads(self, x: List[int]) -> List[int]:
        ws = self._scatter(x)  # clean: near miss, put after the slice that copies
        if ws is None:
            self.fallbacks += 1
            return list(x)
        out = ws.flat[:len(x)]
        self.cache.put(ws)
        return out

    def gather_heads(self, x: List[int]) -> List[int]:
        ws = self._scatter(x)  # leak: sliced into a new list and dropped
        if ws is not None:
            return ws.flat[:len(x)]
        self.fallbacks += 1
        return list(x)

    def qkv(self, q: List[int], k: List[int], v: List[int]) -> Optional[List[List[int]]]:
        wq = self._scatter(q)  # clean: given back on every way
        if wq is None:
            return None
        wk = self._scatter(k)  # leak: not rolled back when v has no workspace
        if wk is None:
            self.cache.put(wq)
            return None
        wv = self._scatter(v)  # clean: given back in the loop
        if wv is None:
            self.cache.put(wq)
            return None
        outs = []
        for ws, src in ((wq, q), (wk, k), (wv, v)):
            outs.append(ws.flat[:len(src)])
            self.cache.put(ws)
        return outs

    def qkv_list(self, parts: List[List[int]]) -> Optional[List[List[int]]]:
        held: List[Workspace] = []
        try:
            for part in parts:
                ws = self._scatter(part)  # clean: near miss, kept in held, which finally empties even on the early return
                if ws is None:
                    return None
                held.append(ws)
            return [w.flat[:len(p)] for w, p in zip(held, parts)]
        finally:
            for ws in held:
                self.cache.put(ws)

    def safe_exchange(self, x: List[int], limit: int) -> List[int]:
        ws = self.cache.get((1, limit))  # leak: the ValueError is caught and ws is not put back
        if ws is None:
            return x
        try:
            all_to_all(ws, x)
            out = list(ws.flat[:len(x)])
            self.cache.put(ws)
        except ValueError:
            self.fallbacks += 1
            out = list(x)
        return out

    def exchange_checked(self, x: List[int], limit: int) -> List[int]:
        ws = self.cache.get((1, limit))  # clean: put in finally though the error is caught
        if ws is None:
            return x
        try:
            all_to_all(ws, x)
            return list(ws.flat[:len(x)])
        except ValueError:
            return list(x)
        finally:
            self.cache.put(ws)


class AsyncHandle:
    """Work handle; wait() hands back the workspace through on_done."""

    def __init__(self, ws: Workspace, on_done: Callable[[Workspace], None]) -> None:
        self._ws: Optional[Workspace] = ws
        self._on_done = on_done

    def wait(self) -> List[int]:
        ws, self._ws = self._ws, None
        if ws is None:
            return []
        out = list(ws.flat)
        self._on_done(ws)
        return out


class OverlappedAttention:
    def __init__(self, cache: WorkspaceCache) -> None:
        self.cache = cache
        self.handles: List[AsyncHandle] = []
        self.pending: Dict[str, AsyncHandle] = {}

    def launch(self, x: List[int]) -> Optional[AsyncHandle]:
        ws = self.cache.get((1, len(x)))  # clean: moves into the handle whose wait puts it back
        if ws is None:
            return None
        all_to_all(ws, x)
        return AsyncHandle(ws, self.cache.put)

    def enqueue(self, x: List[int]) -> None:
        h = self.launch(x)  # clean: appended, flush waits for all
        if h is not None:
            self.handles.append(h)

    def flush(self) -> List[List[int]]:
        outs = [h.wait() for h in self.handles]
        self.handles.clear()
        return outs

    def warm(self, x: List[int]) -> bool:
        h = self.launch(x)  # leak: the handle is never waited for
        return h is not None

    def submit(self, name: str, x: List[int]) -> None:
        h = self.launch(x)  # clean: near miss, a handle of the same name is waited for first
        if h is None:
            return
        old = self.pending.pop(name, None)
        if old is not None:
            old.wait()
        self.pending[name] = h

    def collect(self, name: str) -> List[int]:
        h = self.pending.pop(name, None)
        return h.wait() if h is not None else []

    def run_sync(self, x: List[int], discard: bool) -> Optional[List[int]]:
        h = self.launch(x)  # leak: discard returns without waiting
        if h is None:
            return None
        if discard:
            return None
        return h.wait()


def log_shapes(cache: WorkspaceCache, shapes: List[Shape]) -> Dict[str, Any]:
    stats: Dict[str, Any] = {}
    for shape in shapes:
        ws = cache.get(shape)  # clean: near miss, continue only when nothing was taken
        if ws is None:
            stats[str(shape)] = None
            continue
        stats[str(shape)] = len(ws.flat)
        cache.put(ws)
    return stats


if __name__ == "__main__":
    wc = WorkspaceCache(4096)
    sp = SeqAllToAll(wc, 2)
    sp.scatter_heads([1, 2, 3])
    sp.qkv([1], [2], [3])
    sp.qkv_list([[1], [2, 3]])
    sp.exchange_checked([1, 2, 3], 2)
    ov = OverlappedAttention(wc)
    ov.enqueue([1, 2])
    ov.flush()
    ov.submit("q", [1])
    ov.submit("q", [2])
    ov.collect("q")
    log_shapes(wc, [(2, 2), (1000, 1000)])
    assert wc.live == 0, wc.live
