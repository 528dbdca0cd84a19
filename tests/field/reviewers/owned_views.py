"""Request slots with ownership flags, wrappers around the pool and a model runner."""
from __future__ import annotations

from dataclasses import dataclass

import torch


class ReqToTokenPool:
    def __init__(self, size: int, max_len: int):
        self.table = torch.zeros((size, max_len), dtype=torch.int32)
        self.free_rows = list(range(size))

    def alloc(self, need: int) -> list[int] | None:
        if need > len(self.free_rows):
            return None
        rows, self.free_rows = self.free_rows[:need], self.free_rows[need:]  # clean: the rows cut off are returned
        return rows

    def free(self, rows: list[int]) -> None:
        self.free_rows.extend(rows)


class CountingPool:
    """Counts what passes through."""

    def __init__(self, inner: ReqToTokenPool):
        self.inner = inner
        self.live = 0

    def alloc(self, need: int) -> list[int] | None:
        rows = self.inner.alloc(need)  # clean: near miss, passed on in every case in which it is not None
        if rows is None:
            return None
        self.live += len(rows)
        return rows

    def free(self, rows: list[int]) -> None:
        self.live -= len(rows)
        self.inner.free(rows)


class CappedPool:
    def __init__(self, inner: CountingPool, cap: int):
        self.inner = inner
        self.cap = cap

    def alloc(self, need: int) -> list[int] | None:
        rows = self.inner.alloc(need)  # leak: above the cap None is returned with the rows still allocated inside
        if rows is None or self.inner.live > self.cap:
            return None
        return rows

    def free(self, rows: list[int]) -> None:
        self.inner.free(rows)


@dataclass
class RowHandle:
    rows: list[int]
    pool: CountingPool
    owned: bool = True

    def drop(self) -> None:
        if self.owned:
            self.pool.free(self.rows)
        self.owned = False

    def borrowed(self) -> "RowHandle":
        return RowHandle(self.rows, self.pool, owned=False)


class ModelRunner:
    def __init__(self, pool: CountingPool):
        self.pool = pool
        self.handles: dict[str, RowHandle] = {}
        self.graph_handle: RowHandle | None = None
        self.dummy: RowHandle | None = None

    def _make(self, need: int) -> RowHandle | None:
        rows = self.pool.alloc(need)  # clean: near miss, owned by the handle which is returned
        return None if rows is None else RowHandle(rows, self.pool)

    def add(self, rid: str, need: int) -> bool:
        if rid in self.handles:
            return True
        h = self._make(need)  # clean: dropped by remove()
        if h is None:
            return False
        self.handles[rid] = h
        return True

    def add_weak(self, rid: str, need: int) -> bool:
        if rid in self.handles:
            return True
        h = self._make(need)  # leak: the table gets the borrowed handle, whose drop() frees nothing
        if h is None:
            return False
        self.handles[rid] = h.borrowed()
        return True

    def remove(self, rid: str) -> None:
        h = self.handles.pop(rid, None)
        if h is not None:
            h.drop()

    def run_batch(self, need: int, keep: bool) -> RowHandle | None:
        """With `keep` the caller owns the rows, otherwise None comes back."""
        h = self._make(need)  # clean: near miss, returned with keep and dropped without
        if h is None:
            return None
        self.pool.inner.table[h.rows] = 1
        if keep:
            return h
        h.drop()
        return None

    def run_twice(self, need: int) -> int:
        first = self.run_batch(need, keep=True)  # leak: returned handle is used for its length and never dropped
        second = self.run_batch(need, keep=False)  # clean: near miss, keep=False drops the rows itself
        return (0 if first is None else len(first.rows)) + int(second is not None)

    def run_kept(self, need: int) -> int:
        h = self.run_batch(need, keep=True)  # clean: dropped here
        if h is None:
            return 0
        n = len(h.rows)
        h.drop()
        return n

    def forward(self, ids: torch.Tensor, rows: list[int] | None = None) -> torch.Tensor | None:
        own = rows is None
        if rows is None:
            rows = self.pool.alloc(len(ids))  # clean: near miss, freed under the flag that says it was allocated here
            if rows is None:
                return None
        out = self.pool.inner.table[rows, 0] + ids
        if own:
            self.pool.free(rows)
        return out

    def forward_padded(self, ids: torch.Tensor, pad: int, rows: list[int] | None = None) -> torch.Tensor | None:
        own = rows is None
        if own:
            rows = self.pool.alloc(len(ids))  # leak: padding rebinds `rows` to the dummy's rows and clears the flag
            if rows is None:
                return None
        if pad and self.dummy is not None:
            rows, own = self.dummy.rows[: len(ids)], False
        out = self.pool.inner.table[rows, 0]
        if own:
            self.pool.free(rows)
        return out

    def capture(self, need: int) -> bool:
        if self.graph_handle is not None:
            self.graph_handle.drop()
        self.graph_handle = self._make(need)  # clean: near miss, the earlier handle is dropped before, close() drops the last
        return self.graph_handle is not None

    def make_dummy(self, need: int) -> bool:
        self.dummy = self._make(need)  # leak: close() drops the graph handle and the requests but not the dummy
        return self.dummy is not None

    def close(self) -> None:
        for rid in list(self.handles):
            self.remove(rid)
        if self.graph_handle is not None:
            self.graph_handle.drop()
            self.graph_handle = None
