"""Pinned row pages of the online feature store.

A page stays in memory as long as somebody pins it. Eviction takes unpinned
pages only, therefore a pin that is not undone shrinks the cache for good.
"""
from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Iterable

import numpy as np


class CacheFull(Exception):
    pass


@dataclass
class Page:
    key: tuple[str, int]
    rows: np.ndarray
    version: int
    pins: int = 0
    dirty: bool = False


class PageCache:
    def __init__(self, loader: Callable, capacity: int):
        self._load = loader
        self._cap = capacity
        self._pages: OrderedDict[tuple[str, int], Page] = OrderedDict()
        self._mu = threading.RLock()

    def pin(self, table: str, no: int) -> Page:
        with self._mu:
            page = self._pages.get((table, no))
            if page is None:
                self._make_room()
                rows, version = self._load(table, no)
                page = Page((table, no), rows, version)
                self._pages[page.key] = page
            page.pins += 1
            self._pages.move_to_end(page.key)
            return page

    def pin_if_present(self, table: str, no: int) -> Page | None:
        with self._mu:
            page = self._pages.get((table, no))
            if page is not None:
                page.pins += 1
            return page

    def pin_version(self, table: str, no: int, at_least: int) -> Page | None:
        page = self.pin_if_present(table, no)  # leak: a page of an older version stays pinned
        if page is None or page.version < at_least:
            return None
        return page

    def unpin(self, page: Page, dirty: bool = False) -> None:
        with self._mu:
            page.pins -= 1
            page.dirty |= dirty

    def _make_room(self) -> None:
        if len(self._pages) < self._cap:
            return
        for key, page in self._pages.items():
            if page.pins == 0 and not page.dirty:
                del self._pages[key]
                return
        raise CacheFull(self._cap)


class PinScope:
    """Collects pins and undoes them together."""

    def __init__(self, cache: PageCache):
        self.cache = cache
        self.held: list[Page] = []

    def take(self, table: str, no: int) -> Page:
        page = self.cache.pin(table, no)  # clean: near miss, appended to self.held, undone by __exit__
        self.held.append(page)
        return page

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        while self.held:
            self.cache.unpin(self.held.pop())


@dataclass
class LookupRequest:
    table: str
    ids: list[int]
    pages: dict[int, Page] = field(default_factory=dict)
    done: bool = False


class FeatureReader:
    ROWS = 256

    def __init__(self, cache: PageCache):
        self.cache = cache

    def row(self, table: str, rid: int) -> np.ndarray:
        page = self.cache.pin(table, rid // self.ROWS)  # clean: unpinned after the copy
        out = page.rows[rid % self.ROWS].copy()
        self.cache.unpin(page)
        return out

    def row_checked(self, table: str, rid: int, default: np.ndarray) -> np.ndarray:
        page = self.cache.pin(table, rid // self.ROWS)  # leak: a row out of range returns the default with the page pinned
        slot = rid % self.ROWS
        if slot >= len(page.rows):
            return default
        out = page.rows[slot].copy()
        self.cache.unpin(page)
        return out

    def _locate(self, table: str, rid: int) -> Page:
        return self.cache.pin(table, rid // self.ROWS)  # clean: returned to the caller

    def norm(self, table: str, rid: int) -> float:
        page = self._locate(table, rid)  # clean: finally
        try:
            return float(np.linalg.norm(page.rows[rid % self.ROWS]))
        finally:
            self.cache.unpin(page)

    def head(self, table: str) -> np.ndarray:
        return self._locate(table, 0).rows[:8].copy()  # leak: rows are copied and the pinned page dropped

    def rows(self, table: str, ids: Iterable[int]) -> list[np.ndarray]:
        out = []
        page = None
        for rid in sorted(ids):
            no = rid // self.ROWS
            if page is None or page.key[1] != no:
                if page is not None:
                    self.cache.unpin(page)
                page = self.cache.pin(table, no)  # clean: near miss, unpinned before the rebinding and after the loop
            out.append(page.rows[rid % self.ROWS].copy())
        if page is not None:
            self.cache.unpin(page)
        return out

    def rows_by_page(self, table: str, ids: Iterable[int]) -> list[np.ndarray]:
        out = []
        current = -1
        page = None
        for rid in sorted(ids):
            no = rid // self.ROWS
            if no != current:
                page = self.cache.pin(table, no)  # leak: moving to the next page rebinds the pinned one
                current = no
            out.append(page.rows[rid % self.ROWS].copy())
        if page is not None:
            self.cache.unpin(page)
        return out

    def join(self, left: str, right: str, rid: int) -> np.ndarray | None:
        a = self.cache.pin(left, rid // self.ROWS)  # clean: unpinned before each return
        b = self.cache.pin_if_present(right, rid // self.ROWS)  # clean: None-checked and unpinned
        if b is None:
            self.cache.unpin(a)
            return None
        row = np.concatenate([a.rows[rid % self.ROWS], b.rows[rid % self.ROWS]])
        self.cache.unpin(b)
        self.cache.unpin(a)
        return row

    def window(self, table: str, first: int, last: int) -> np.ndarray:
        with PinScope(self.cache) as scope:
            pages = [scope.take(table, n) for n in range(first, last + 1)]  # clean: with block of the scope
            return np.concatenate([p.rows for p in pages])

    def prepare(self, req: LookupRequest) -> None:
        for rid in req.ids:
            no = rid // self.ROWS
            page = self.cache.pin(req.table, no)  # leak: a second id of the same page overwrites the entry and pins twice
            req.pages[no] = page

    def prepare_unique(self, req: LookupRequest) -> None:
        for no in {rid // self.ROWS for rid in req.ids}:
            req.pages[no] = self.cache.pin(req.table, no)  # clean: near miss, one entry per page, answer unpins them

    def answer(self, req: LookupRequest) -> np.ndarray:
        out = np.stack([req.pages[r // self.ROWS].rows[r % self.ROWS] for r in req.ids])
        for page in req.pages.values():
            self.cache.unpin(page)
        req.pages.clear()
        req.done = True
        return out

    def scan(self, table: str, pages: int, pred: Callable[[np.ndarray], bool]):
        for no in range(pages):
            page = self.cache.pin(table, no)  # leak: continue on an empty page skips the unpin
            if not len(page.rows):
                continue
            hits = [r.copy() for r in page.rows if pred(r)]
            self.cache.unpin(page)
            yield from hits
