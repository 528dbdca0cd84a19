from __future__ import annotations

from typing import Callable, List, Optional, Sequence

from .layout import Key, Layout, LayoutCache, LayoutTable
from .workspace import IndexBuffer, IndexPool

try:
    from torch import nn

    Base = nn.Module
except ImportError:

    class Base:  # type: ignore[no-redef]
        def __init__(self) -> None:
            self.training = True

        def __call__(self, *a):
            return self.forward(*a)


Kernel = Callable[[Sequence[float], List[int]], Sequence[float]]


class LayoutUserMixin:
    """Modules that follow the sequence length with one attached layout."""

    table: LayoutTable
    _layout: Optional[Layout] = None

    def follow(self, key: Key) -> Layout:
        if self._layout is not None and self._layout.key == key:
            return self._layout
        fresh = self.table.attach(key)  # clean: near miss, the former layout is detached before it is replaced
        self.unfollow()
        self._layout = fresh
        return fresh

    def unfollow(self) -> None:
        if self._layout is not None:
            self.table.detach(self._layout)
            self._layout = None


class BlockSparseAttention(LayoutUserMixin, Base):
    def __init__(self, table: LayoutTable, window: int, kernel: Kernel) -> None:
        super().__init__()
        self.table = table
        self.window = window
        self.kernel = kernel

    def forward(self, x: Sequence[float]) -> Sequence[float]:
        layout = self.follow((len(x), self.window, 1))  # clean: the module keeps it, follow or unfollow detaches
        return self.kernel(x, layout.cols.tolist())


class SlidingWindowAttention(Base):
    def __init__(self, pool: IndexPool, table: LayoutTable, kernel: Kernel, window: int = 2) -> None:
        super().__init__()
        self.pool = pool
        self.table = table
        self.cache = LayoutCache(table, 2)
        self.kernel = kernel
        self.window = window
        self._graph_cols: Optional[IndexBuffer] = None

    def forward(self, x: Sequence[float]) -> Sequence[float]:
        if self.training:
            return self.kernel(x, self.cache.touch((len(x), self.window, 1)).cols.tolist())  # clean: near miss, the cache keeps the reference
        layout = self.table.attach((len(x), self.window, 0))  # clean: detached in finally
        try:
            return self.kernel(x, layout.cols.tolist())
        finally:
            self.table.detach(layout)

    def decode(self, x: Sequence[float], pos: int) -> Sequence[float]:
        cols = self.pool.lend(2 * self.window + 1)  # leak: position 0 returns x without give
        if cols is None:
            return self.forward(x)
        if pos == 0:
            return x
        for k in range(max(0, pos - self.window), pos):
            cols.push(k)
        out = self.kernel(x, cols.tolist())
        cols.give()
        return out

    def global_tokens(self, x: Sequence[float], marks: Sequence[int]) -> List[int]:
        cols = self.pool.lend_or_raise(4)  # clean: near miss, regrow consumes it, else given at the end
        for m in marks:
            if cols.n == cols.cap:
                bigger = self.pool.regrow(cols, 2 * cols.cap)  # clean: becomes cols, which is given below
                if bigger is None:
                    break
                cols = bigger
            cols.push(m)
        picked = cols.tolist()
        cols.give()
        return picked

    def random_blocks(self, n: int, seeds: Sequence[int]) -> List[int]:
        cols = self.pool.lend_or_raise(4)  # leak: cols is rebound to the wider buffer and never given
        if len(seeds) > 4:
            cols = self.pool.lend_or_raise(len(seeds))  # clean: given after the loop
        for s in seeds:
            cols.push(s % n)
        picked = cols.tolist()
        cols.give()
        return picked

    def capture(self, n: int) -> bool:
        if self._graph_cols is not None:
            return True
        self._graph_cols = self.pool.lend(n)  # clean: kept for the graph, given by release_graph
        return self._graph_cols is not None

    def release_graph(self) -> None:
        cols, self._graph_cols = self._graph_cols, None
        if cols is not None:
            cols.give()
