"""Block-sparse attention layouts over counted physical blocks."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Sequence

log = logging.getLogger(__name__)


class BlockTable:
    """Physical blocks; a block returns to the free list when its count reaches zero."""

    def __init__(self, n: int):
        self.refs = [0] * n
        self.free = list(range(n))
        self.store: Dict[int, bytes] = {}

    def new_block(self) -> Optional[int]:
        if not self.free:
            return None
        b = self.free.pop()
        self.refs[b] = 1
        return b

    def incref(self, b: int) -> None:
        self.refs[b] += 1

    def decref(self, b: int) -> None:
        self.refs[b] -= 1
        if self.refs[b] == 0:
            self.store.pop(b, None)
            self.free.append(b)


@dataclass
class SparseLayout:
    """Holds one reference on each block that its rows name."""
    rows: List[List[int]] = field(default_factory=list)

    def blocks(self) -> List[int]:
        return [b for row in self.rows for b in row]


class LayoutBuilder:
    def __init__(self, table: BlockTable):
        self.table = table

    def dispose(self, layout: SparseLayout) -> None:
        for b in layout.blocks():
            self.table.decref(b)
        layout.rows.clear()

    def local_window(self, rows: int, width: int) -> Optional[SparseLayout]:
        layout = SparseLayout()
        for _ in range(rows):
            row: List[int] = []
            layout.rows.append(row)
            for _ in range(width):
                b = self.table.new_block()  # clean: None-checked, kept by the layout, dispose on failure
                if b is None:
                    self.dispose(layout)
                    return None
                row.append(b)
        return layout

    def strided(self, rows: int, stride: int) -> Optional[SparseLayout]:
        layout = SparseLayout()
        for r in range(rows):
            row: List[int] = []
            for _ in range(0, rows, stride):
                b = self.table.new_block()  # leak: blocks of the unfinished row are not in the layout when dispose runs
                if b is None:
                    self.dispose(layout)
                    return None
                row.append(b)
            layout.rows.append(row)
        return layout

    def add_global(self, layout: SparseLayout, columns: Sequence[int]) -> None:
        for row in layout.rows:
            for b in columns:
                self.table.incref(b)  # leak: count raised although the row already holds the block
                if b in row:
                    continue
                row.append(b)

    def add_random(self, layout: SparseLayout, picks: Sequence[int]) -> None:
        for row in layout.rows:
            for b in picks:
                if b in row:
                    continue
                self.table.incref(b)  # clean: near miss, the continue comes before the count
                row.append(b)

    def share(self, layout: SparseLayout) -> SparseLayout:
        for b in layout.blocks():
            self.table.incref(b)  # clean: the new layout owns these counts
        return SparseLayout([list(row) for row in layout.rows])

    def writable(self, layout: SparseLayout, r: int, c: int) -> Optional[int]:
        """Copy on write."""
        b = layout.rows[r][c]
        if self.table.refs[b] == 1:
            return b
        fresh = self.table.new_block()  # clean: near miss, takes the place of b in the row
        if fresh is None:
            return None
        if b in self.table.store:
            self.table.store[fresh] = self.table.store[b]
        layout.rows[r][c] = fresh
        self.table.decref(b)
        return fresh


class LayoutCache:
    """Layouts by sequence shape; the cache holds its own count on every block."""

    def __init__(self, table: BlockTable, builder: LayoutBuilder):
        self.table = table
        self.builder = builder
        self.by_shape: Dict[str, SparseLayout] = {}
        self.by_user: Dict[str, SparseLayout] = {}

    def put_shape(self, key: str, layout: SparseLayout) -> None:
        held = self.builder.share(layout)  # leak: an entry already under key is overwritten
        self.by_shape[key] = held

    def put_user(self, key: str, layout: SparseLayout) -> None:
        held = self.builder.share(layout)  # clean: near miss, the old entry is disposed of first
        old = self.by_user.pop(key, None)
        if old is not None:
            self.builder.dispose(old)
        self.by_user[key] = held

    def evict(self, key: str) -> None:
        for side in (self.by_shape, self.by_user):
            layout = side.pop(key, None)
            if layout is not None:
                self.builder.dispose(layout)


class BlockScorer:
    def __init__(self, table: BlockTable, fetch: Callable[[int], bytes]):
        self.table = table
        self.fetch = fetch

    def score(self, b: int, weight: float) -> float:
        self.table.incref(b)  # leak: early return for a zero weight
        data = self.table.store.get(b, b"")
        if weight == 0.0:
            return 0.0
        s = weight * sum(data)
        self.table.decref(b)
        return s

    def score_row(self, row: Sequence[int], weight: float) -> float:
        total = 0.0
        for b in row:
            self.table.incref(b)  # clean: near miss, the continue runs through finally
            try:
                data = self.table.store.get(b)
                if data is None:
                    continue
                total += weight * sum(data)
            finally:
                self.table.decref(b)
        return total

    def prefetch(self, blocks: Sequence[int]) -> int:
        loaded = 0
        for b in blocks:
            self.table.incref(b)  # leak: OSError is logged and survived without a decref
            try:
                self.table.store[b] = self.fetch(b)
            except OSError as exc:
                log.warning("block %d: %s", b, exc)
                continue
            loaded += 1
            self.table.decref(b)
        return loaded
