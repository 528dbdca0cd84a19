"""Sliding window cache: blocks that fall out of the window are recycled."""
from __future__ import annotations

import abc
from collections import deque
from typing import Deque, Dict, List, Optional

import torch


class RingPages:
    def __init__(self, n: int) -> None:
        self._free: List[int] = list(range(n))
        self._retired: List[int] = []
        self.epoch = 0

    def get_page(self) -> int:
        if not self._free:
            self._free, self._retired = self._retired, []
            self.epoch += 1
        if not self._free:
            raise RuntimeError("window cache exhausted")
        return self._free.pop()

    def put_page(self, p: int) -> None:
        self._retired.append(p)

    def shrink(self, keep: int) -> List[int]:
        removed: List[int] = []
        while len(self._free) > keep:
            p = self._free.pop()  # leak: an odd page is taken off the list and ends up in neither place
            if p % 2:
                continue
            removed.append(p)
        return removed

    def shrink_even(self, keep: int) -> List[int]:
        removed: List[int] = []
        spared: List[int] = []
        while len(self._free) > keep:
            p = self._free.pop()  # clean: near miss, pages that are spared rejoin the list at the end
            (spared if p % 2 else removed).append(p)
        self._free.extend(spared)
        return removed

    def adopt(self, pages: List[int]) -> None:
        self._free.extend(pages)


class CacheBase(abc.ABC):
    def __init__(self, pages: RingPages, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self.rows: Dict[int, Deque[int]] = {}

    @abc.abstractmethod
    def grow(self, rid: int, pos: int) -> Optional[int]:
        ...

    def drop(self, rid: int) -> None:
        for p in self.rows.pop(rid, ()):
            self.pages.put_page(p)


class WindowCache(CacheBase):
    def __init__(self, pages: RingPages, page_size: int, window: int) -> None:
        super().__init__(pages, page_size)
        self.window = window

    def grow(self, rid: int, pos: int) -> Optional[int]:
        row = self.rows.setdefault(rid, deque())
        if pos % self.page_size:
            return row[-1]
        while len(row) * self.page_size >= self.window:
            self.pages.put_page(row.popleft())
        p = self.pages.get_page()  # clean: appended to the row, which drop empties
        row.append(p)
        return p

    def prefill(self, rid: int, n: int) -> List[int]:
        need = -(-n // self.page_size)
        got = [self.pages.get_page() for _ in range(need)]  # leak: the row keeps the last ones only, the older pages vanish
        keep = got[-(self.window // self.page_size):]
        self.drop(rid)
        self.rows[rid] = deque(keep)
        return keep

    def prefill_trimmed(self, rid: int, n: int) -> List[int]:
        need = -(-n // self.page_size)
        got = [self.pages.get_page() for _ in range(need)]  # clean: near miss, the pages before the window are put back
        cut = max(0, need - self.window // self.page_size)
        for p in got[:cut]:
            self.pages.put_page(p)
        self.drop(rid)
        self.rows[rid] = deque(got[cut:])
        return got[cut:]


class BoundedWindowCache(CacheBase):
    def __init__(self, pages: RingPages, page_size: int, limit: int) -> None:
        super().__init__(pages, page_size)
        self.limit = limit

    def grow(self, rid: int, pos: int) -> Optional[int]:
        row = self.rows.get(rid)
        if row is None:
            row = self.rows[rid] = deque(maxlen=self.limit)
        p = self.pages.get_page()  # leak: the bounded deque silently pushes the oldest page out
        row.append(p)
        return p


class SinkCache(WindowCache):
    """Keeps the first page of every row as attention sink."""

    def __init__(self, pages: RingPages, page_size: int, window: int) -> None:
        super().__init__(pages, page_size, window)
        self.sinks: Dict[int, int] = {}

    def open_row(self, rid: int) -> None:
        if rid in self.sinks:
            return
        self.sinks[rid] = self.pages.get_page()  # clean: drop puts the sink back
        self.rows.setdefault(rid, deque())

    def drop(self, rid: int) -> None:
        s = self.sinks.pop(rid, None)
        if s is not None:
            self.pages.put_page(s)
        super().drop(rid)

    def rotate(self, rid: int) -> int:
        fresh = self.pages.get_page()  # clean: takes the place of the old sink, which is put back
        old = self.sinks[rid]
        self.sinks[rid] = fresh
        self.pages.put_page(old)
        return fresh


class TaggedSinkCache(SinkCache):
    def __init__(self, pages: RingPages, page_size: int, window: int) -> None:
        super().__init__(pages, page_size, window)
        self.extra: Dict[int, int] = {}

    def tag(self, rid: int) -> None:
        if rid not in self.extra:
            self.extra[rid] = self.pages.get_page()  # leak: the overriding drop removes the entry without putting the page back

    def drop(self, rid: int) -> None:
        self.extra.pop(rid, None)
        super().drop(rid)


def replay(cache: WindowCache, lens: List[int]) -> torch.Tensor:
    counts = torch.zeros(len(lens))
    for rid, n in enumerate(lens):
        for pos in range(n):
            if cache.grow(rid, pos) is None:  # clean: the rows are dropped below
                break
        counts[rid] = len(cache.rows[rid])
    for rid in range(len(lens)):
        cache.drop(rid)
    return counts
