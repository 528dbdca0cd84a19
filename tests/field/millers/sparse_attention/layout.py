"""Sparsity layouts: which key blocks each query block attends to. Counted, shared between layers."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional, Tuple

from .workspace import IndexBuffer, IndexPool

Key = Tuple[int, int, int]


class Layout:
    def __init__(self, key: Key, cols: IndexBuffer) -> None:
        self.key = key
        self.cols = cols
        self.refs = 0


class LayoutTable:
    def __init__(self, pool: IndexPool) -> None:
        self.pool = pool
        self._by_key: Dict[Key, Layout] = {}
        self._lock = threading.RLock()

    def attach(self, key: Key) -> Layout:
        """Raise the count of the layout for ``key``, building it at first use."""
        with self._lock:
            layout = self._by_key.get(key)
            if layout is None:
                blocks, window, _ = key
                cols = self.pool.lend_or_raise(blocks * (2 * window + 1))  # clean: owned by the layout, given at the last detach
                for q in range(blocks):
                    for k in range(max(0, q - window), min(blocks, q + window + 1)):
                        cols.push(k)
                layout = self._by_key[key] = Layout(key, cols)
            layout.refs += 1
            return layout

    def detach(self, layout: Layout) -> None:
        with self._lock:
            layout.refs -= 1
            if layout.refs:
                return
            del self._by_key[layout.key]
        layout.cols.give()

    def density(self, key: Key) -> float:
        layout = self.attach(key)  # leak: an empty layout returns 0.0 without detach
        if layout.cols.n == 0:
            return 0.0
        d = layout.cols.n / float(key[0] ** 2)
        self.detach(layout)
        return d

    def transpose(self, layout: Layout) -> List[int]:
        rows = self.pool.lend(layout.cols.n)  # leak: symmetric layouts return the columns before rows is given
        if rows is None:
            return sorted(layout.cols.tolist())
        if layout.key[2] == 0:
            return layout.cols.tolist()
        for c in sorted(layout.cols.tolist()):
            rows.push(c)
        out = rows.tolist()
        rows.give()
        return out


class LayoutCache:
    """The layouts of the last few sequence lengths."""

    def __init__(self, table: LayoutTable, size: int) -> None:
        self.table = table
        self.size = size
        self._recent: List[Layout] = []

    def touch(self, key: Key) -> Layout:
        for layout in self._recent:
            if layout.key == key:
                return layout
        layout = self.table.attach(key)  # clean: near miss, the cache keeps it and detaches at eviction or clear
        self._recent.append(layout)
        if len(self._recent) > self.size:
            self.table.detach(self._recent.pop(0))
        return layout

    def clear(self) -> None:
        while self._recent:
            self.table.detach(self._recent.pop())


class PinnedLayouts:
    """Layouts of CUDA-graph captures, kept by capture id."""

    def __init__(self, table: LayoutTable) -> None:
        self.table = table
        self._by_capture: Dict[int, Layout] = {}

    def capture(self, capture_id: int, key: Key) -> None:
        self._by_capture[capture_id] = self.table.attach(key)  # leak: recapture under the same id overwrites the attached layout

    def forget(self, capture_id: int) -> Optional[Key]:
        layout = self._by_capture.pop(capture_id, None)
        if layout is None:
            return None
        self.table.detach(layout)
        return layout.key
