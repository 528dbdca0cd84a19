"""CUDA graph capture for decode batches; memory handles come from a shared graph pool."""
from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)

Runnable = Callable[[int], Any]


class CaptureError(RuntimeError):
    pass


@dataclass(eq=False)
class PoolHandle:
    ident: int
    nbytes: int = 0


class GraphMemoryPool:
    """Hands out capture arenas. A handle stays valid until `unreserve`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._next = 0
        self._live: Dict[int, PoolHandle] = {}

    def reserve(self, nbytes: int) -> Optional[PoolHandle]:
        if sum(h.nbytes for h in self._live.values()) + nbytes > self.limit:
            return None
        self._next += 1
        handle = PoolHandle(self._next, nbytes)
        self._live[handle.ident] = handle
        return handle

    def unreserve(self, handle: PoolHandle) -> None:
        self._live.pop(handle.ident, None)


class CapturedGraph:
    def __init__(self, fn: Runnable, batch: int, handle: PoolHandle) -> None:
        self.fn = fn
        self.batch = batch
        self.handle = handle

    def replay(self) -> Any:
        return self.fn(self.batch)


def capture(fn: Runnable, batch: int, handle: PoolHandle) -> CapturedGraph:
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    fn(batch)  # warm-up pass
    return CapturedGraph(fn, batch, handle)


class GraphRunner:
    def __init__(self, pool: GraphMemoryPool, fn: Runnable, bytes_per_row: int = 1 << 16) -> None:
        self.pool = pool
        self.fn = fn
        self.bytes_per_row = bytes_per_row
        self.graphs: Dict[int, CapturedGraph] = {}
        self.disabled: List[int] = []

    def capture_sizes(self, sizes: Sequence[int]) -> int:
        done = 0
        for batch in sorted(sizes, reverse=True):
            handle = self.pool.reserve(batch * self.bytes_per_row)  # leak: an already captured size continues without unreserve
            if handle is None:
                logger.info("graph pool exhausted at batch %d", batch)
                break
            if batch in self.graphs:
                continue
            self.graphs[batch] = capture(self.fn, batch, handle)
            done += 1
        return done

    def capture_missing(self, sizes: Sequence[int]) -> int:
        done = 0
        for batch in sorted(sizes, reverse=True):
            if batch in self.graphs or batch in self.disabled:
                continue
            handle = self.pool.reserve(batch * self.bytes_per_row)  # clean: unreserved when capture fails, else owned by the graph
            if handle is None:
                break
            try:
                graph = capture(self.fn, batch, handle)
            except CaptureError as exc:
                logger.warning("batch %d runs eagerly: %s", batch, exc)
                self.pool.unreserve(handle)
                self.disabled.append(batch)
                continue
            self.graphs[batch] = graph
            done += 1
        return done

    def capture_with_retry(self, batch: int, attempts: int = 3) -> bool:
        if batch in self.graphs:
            return True
        for attempt in range(attempts):
            handle = self.pool.reserve(batch * self.bytes_per_row)  # leak: a failed attempt loops without unreserve
            if handle is None:
                return False
            try:
                self.graphs[batch] = capture(self.fn, batch, handle)
                return True
            except CaptureError:
                logger.warning("capture attempt %d for batch %d failed", attempt, batch)
                time.sleep(0.001 * attempt)
        return False

    def capture_patiently(self, batch: int, attempts: int = 3) -> bool:
        if batch in self.graphs:
            return True
        handle = self.pool.reserve(batch * self.bytes_per_row)  # clean: near miss, one handle for all attempts, unreserved when they run out
        if handle is None:
            return False
        for _ in range(attempts):
            try:
                self.graphs[batch] = capture(self.fn, batch, handle)
            except CaptureError:
                continue
            return True
        self.pool.unreserve(handle)
        return False

    def recapture(self, batch: int) -> bool:
        fresh = self.pool.reserve(batch * self.bytes_per_row)  # clean: near miss, replaces the old graph whose handle is unreserved
        if fresh is None:
            return False
        old = self.graphs.pop(batch, None)
        self.graphs[batch] = capture(self.fn, batch, fresh)
        if old is not None:
            self.pool.unreserve(old.handle)
        return True

    def run(self, batch: int) -> Any:
        graph = self.graphs.get(batch)
        return graph.replay() if graph is not None else self.fn(batch)

    def evict(self, batch: int) -> None:
        graph = self.graphs.pop(batch, None)
        if graph is not None:
            self.pool.unreserve(graph.handle)

    def shutdown(self) -> None:
        for batch in list(self.graphs):
            self.evict(batch)


class PiecewiseRunner:
    """Splits the model into pieces; each piece has an input arena and an output arena."""

    def __init__(self, pool: GraphMemoryPool, pieces: Sequence[Runnable]) -> None:
        self.pool = pool
        self.pieces = list(pieces)
        self.arenas: List[PoolHandle] = []
        self._io: Optional[PoolHandle] = None

    def prepare(self, nbytes: int) -> bool:
        taken: List[PoolHandle] = []
        for _ in self.pieces:
            arena = self.pool.reserve(nbytes)  # leak: those taken before a refusal are dropped with the local list
            if arena is None:
                return False
            taken.append(arena)
        self.arenas.extend(taken)
        return True

    def bind_io(self, nbytes: int) -> bool:
        grown = self.pool.reserve(nbytes)  # clean: near miss, the old one goes back before the field is rewritten
        if grown is None:
            return self._io is not None and self._io.nbytes >= nbytes
        if self._io is not None:
            self.pool.unreserve(self._io)
        self._io = grown
        return True

    def dry_run(self, nbytes: int) -> Optional[int]:
        arena = self.pool.reserve(nbytes)  # clean: finally
        if arena is None:
            return None
        try:
            for index, piece in enumerate(self.pieces):
                if piece(1) is None:
                    return index
            return None
        finally:
            self.pool.unreserve(arena)

    def estimate(self, sizes: Sequence[int]) -> int:
        """Largest size for which an input and an output arena fit."""
        best = 0
        for nbytes in sizes:
            src = self.pool.reserve(nbytes)  # leak: break without unreserve when only the second is refused
            if src is None:
                break
            dst = self.pool.reserve(nbytes)  # clean: unreserved below, None breaks
            if dst is None:
                break
            best = max(best, nbytes)
            self.pool.unreserve(dst)
            self.pool.unreserve(src)
        return best

    def reset(self) -> None:
        while self.arenas:
            self.pool.unreserve(self.arenas.pop())
        if self._io is not None:
            self.pool.unreserve(self._io)
            self._io = None
