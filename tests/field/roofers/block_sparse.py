"""Block-sparse attention layouts, shared between operators by reference count."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Callable, Optional

LayoutKey = tuple[str, int, int]


@dataclass
class Layout:
    key: LayoutKey
    block: int
    nnz: int
    rows: list[int] = field(default_factory=list)
    refs: int = 0


class LayoutCache:
    def __init__(self) -> None:
        self._entries: dict[LayoutKey, Layout] = {}
        self._mu = threading.RLock()

    def incref(self, layout: Layout) -> Layout:
        with self._mu:
            layout.refs += 1
        return layout

    def decref(self, layout: Layout) -> None:
        with self._mu:
            layout.refs -= 1
            if layout.refs == 0:
                self._entries.pop(layout.key, None)

    def lookup(self, key: LayoutKey) -> Optional[Layout]:
        """Counted reference to a cached layout, None on a miss."""
        with self._mu:
            layout = self._entries.get(key)
            if layout is None:
                return None
            return self.incref(layout)  # clean: the count is returned to the caller

    def get_or_build(self, key: LayoutKey, build: Callable[[LayoutKey], Layout]) -> Layout:
        with self._mu:
            layout = self.lookup(key)  # clean: returned
            if layout is None:
                layout = build(key)
                self._entries[key] = layout
                self.incref(layout)  # clean: returned with its count
            return layout

    def live(self) -> int:
        return sum(e.refs for e in self._entries.values())


def transpose_key(key: LayoutKey) -> LayoutKey:
    name, rows, cols = key
    return (name + ".T", cols, rows)


def default_build(key: LayoutKey) -> Layout:
    name, rows, cols = key
    return Layout(key, 64, (rows // 64) * (cols // 64), list(range(rows // 64)))


class BlockSparseSelfAttention:
    def __init__(self, cache: LayoutCache, key: LayoutKey) -> None:
        self.cache = cache
        self.layout = cache.get_or_build(key, default_build)  # leak: set_mask overwrites it without decref

    def set_mask(self, key: LayoutKey) -> None:
        if key == self.layout.key:
            return
        self.layout = self.cache.get_or_build(key, default_build)  # leak: a second set_mask overwrites it

    def close(self) -> None:
        self.cache.decref(self.layout)


class BlockSparseCrossAttention:
    def __init__(self, cache: LayoutCache, key: LayoutKey) -> None:
        self.cache = cache
        self.layout = cache.get_or_build(key, default_build)  # clean: dropped by set_mask or close

    def set_mask(self, key: LayoutKey) -> None:
        fresh = self.cache.get_or_build(key, default_build)  # clean: near miss, swapped in and the old one decref'd
        old, self.layout = self.layout, fresh
        self.cache.decref(old)

    def close(self) -> None:
        self.cache.decref(self.layout)


class HeadLayouts:
    """Per-head layouts of one module."""

    def __init__(self, cache: LayoutCache) -> None:
        self.cache = cache
        self.by_head: dict[int, Layout] = {}

    def bind(self, head: int, key: LayoutKey) -> None:
        prev = self.by_head.pop(head, None)
        self.by_head[head] = self.cache.get_or_build(key, default_build)  # clean: near miss, the previous binding is decref'd below
        if prev is not None:
            self.cache.decref(prev)

    def unbind_all(self) -> None:
        for layout in self.by_head.values():
            self.cache.decref(layout)
        self.by_head.clear()


def density(cache: LayoutCache, key: LayoutKey) -> float:
    layout = cache.lookup(key)  # leak: read and forgotten
    if layout is None:
        return 1.0
    total = (key[1] // layout.block) * (key[2] // layout.block)
    return layout.nnz / max(total, 1)


def pick_kernel(cache: LayoutCache, key: LayoutKey, sm: int) -> str:
    layout = cache.lookup(key)  # leak: the empty-layout return keeps the count
    if layout is None:
        return "dense"
    if layout.nnz == 0:
        return "noop"
    name = "bs_tma" if sm >= 90 and layout.block >= 64 else "bs_ldg"
    cache.decref(layout)
    return name


def forward_backward_pair(cache: LayoutCache, key: LayoutKey) -> Optional[tuple[Layout, Layout]]:
    fwd = cache.lookup(key)  # leak: kept when only the transpose is missing
    bwd = cache.lookup(transpose_key(key))  # leak: kept when only the forward layout is missing
    if fwd is None or bwd is None:
        return None
    return fwd, bwd


def run_training_step(cache: LayoutCache, key: LayoutKey, step: Callable[[Layout, Layout], float]) -> Optional[float]:
    pair = forward_backward_pair(cache, key)  # clean: both halves are decref'd in finally
    if pair is None:
        return None
    fwd, bwd = pair
    try:
        return step(fwd, bwd)
    finally:
        cache.decref(bwd)
        cache.decref(fwd)


def shared_rows(cache: LayoutCache, a: LayoutKey, b: LayoutKey) -> int:
    left = cache.lookup(a)  # clean: near miss, decref'd under its own None check
    right = cache.lookup(b)  # clean: near miss, decref'd under its own None check
    n = 0
    if left is not None and right is not None:
        n = len(set(left.rows) & set(right.rows))
    if left is not None:
        cache.decref(left)
    if right is not None:
        cache.decref(right)
    return n
