"""CUDA graph capture cache with shared memory pools and static input rows."""
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch


class MemPools:
    """Graph memory pool ids with reference counts, one per captured graph."""

    def __init__(self, limit: int):
        self.limit = limit
        self.refs: dict[Any, int] = {}

    def open(self) -> Optional[Any]:
        if len(self.refs) >= self.limit:
            return None
        handle = torch.cuda.graph_pool_handle()
        self.refs[handle] = 1
        return handle

    def retain(self, handle: Any) -> Any:
        self.refs[handle] += 1
        return handle

    def drop(self, handle: Any) -> None:
        self.refs[handle] -= 1
        if self.refs[handle] == 0:
            del self.refs[handle]


class InputRows:
    def __init__(self, rows: int, width: int, device: str = "cuda"):
        self.data = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._vacant = list(range(rows))

    def reserve(self, n: int) -> Optional[List[int]]:
        if n > len(self._vacant):
            return None
        cut = len(self._vacant) - n
        rows, self._vacant = self._vacant[cut:], self._vacant[:cut]
        return rows

    def unreserve(self, rows: List[int]) -> None:
        self._vacant.extend(rows)


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    pool: Any
    rows: List[int]
    output: torch.Tensor
    hits: int = 0


class GraphCache:
    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], pools: MemPools, rows: InputRows, capacity: int):
        self.model = model
        self.pools = pools
        self.rows = rows
        self.capacity = capacity
        self.entries: "OrderedDict[int, Captured]" = OrderedDict()
        self.shared: Optional[Any] = None
        self.pinned: dict[str, Any] = {}

    def _record(self, batch_rows: List[int], pool: Any) -> Tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, pool=pool):
            out = self.model(self.rows.data[batch_rows])
        return g, out

    def capture(self, batch: int) -> Optional[Captured]:
        if batch in self.entries:
            self.entries.move_to_end(batch)
            return self.entries[batch]
        while len(self.entries) >= self.capacity:
            self._evict()
        rows = self.rows.reserve(batch)  # clean: near miss, unreserved when the pool is refused, otherwise owned by the entry
        if rows is None:
            return None
        pool = self.pools.open()  # leak: _evict() unreserves the rows and leaves the pool open
        if pool is None:
            self.rows.unreserve(rows)
            return None
        graph, out = self._record(rows, pool)
        entry = Captured(graph, pool, rows, out)
        self.entries[batch] = entry
        return entry

    def _evict(self) -> None:
        _, old = self.entries.popitem(last=False)
        old.graph.reset()
        self.rows.unreserve(old.rows)

    def capture_shared(self, batch: int) -> Optional[Captured]:
        if self.shared is None:
            self.shared = self.pools.open()  # clean: kept in the cache and dropped by clear()
        if self.shared is None:
            return None
        rows = self.rows.reserve(batch)  # clean: near miss, unreserved in the handler, later given back with the entry
        if rows is None:
            return None
        pool = self.pools.retain(self.shared)  # leak: a failed capture unreserves the rows and keeps the reference
        try:
            graph, out = self._record(rows, pool)
        except torch.cuda.OutOfMemoryError:
            self.rows.unreserve(rows)
            return None
        entry = Captured(graph, pool, rows, out)
        self.release_batch(batch)
        self.entries[batch] = entry
        return entry

    def release_batch(self, batch: int) -> None:
        old = self.entries.pop(batch, None)
        if old is not None:
            old.graph.reset()
            self.rows.unreserve(old.rows)
            self.pools.drop(old.pool)

    def replay(self, tokens: torch.Tensor) -> Optional[torch.Tensor]:
        entry = self.entries.get(tokens.shape[0])
        if entry is None:
            return None
        self.rows.data[entry.rows] = tokens
        entry.graph.replay()
        entry.hits += 1
        return entry.output

    def eager(self, tokens: torch.Tensor) -> Optional[torch.Tensor]:
        rows = self.rows.reserve(tokens.shape[0])  # leak: an all-padding batch returns early with the rows reserved
        if rows is None:
            return None
        self.rows.data[rows] = tokens
        if not bool(tokens.any()):
            return torch.zeros_like(tokens)
        out = self.model(self.rows.data[rows])
        self.rows.unreserve(rows)
        return out

    def eager_split(self, tokens: torch.Tensor) -> Optional[torch.Tensor]:
        half = tokens.shape[0] // 2
        a = self.rows.reserve(half)  # clean: near miss, rolled back when the second half does not fit
        if a is None:
            return None
        b = self.rows.reserve(tokens.shape[0] - half)  # clean: unreserved as one list with the first half
        if b is None:
            self.rows.unreserve(a)
            return None
        self.rows.data[a + b] = tokens
        out = self.model(self.rows.data[a + b])
        self.rows.unreserve(a + b)
        return out

    def pin_pool(self, tag: str) -> bool:
        if tag in self.pinned:
            return True
        handle = self.pools.open()  # clean: near miss, kept under the tag, unpin_pool() and clear() drop it
        if handle is None:
            return False
        self.pinned[tag] = handle
        return True

    def unpin_pool(self, tag: str) -> None:
        handle = self.pinned.pop(tag, None)
        if handle is not None:
            self.pools.drop(handle)

    @contextmanager
    def private_pool(self) -> Iterator[Optional[Any]]:
        handle = self.pools.open()  # clean: dropped in finally
        try:
            yield handle
        finally:
            if handle is not None:
                self.pools.drop(handle)

    def profile(self, sizes: List[int]) -> dict[int, int]:
        peak: dict[int, int] = {}
        for n in sizes:
            rows = self.rows.reserve(n)  # leak: breaking off at the first size without a pool keeps its rows
            if rows is None:
                continue
            with self.private_pool() as pool:  # clean: near miss, the context manager drops it, also at the break
                if pool is None:
                    break
                self._record(rows, pool)
                peak[n] = torch.cuda.max_memory_allocated()
            self.rows.unreserve(rows)
        return peak

    def clear(self) -> None:
        for batch in list(self.entries):
            self.release_batch(batch)
        for tag in list(self.pinned):
            self.unpin_pool(tag)
        if self.shared is not None:
            self.pools.drop(self.shared)
            self.shared = None
