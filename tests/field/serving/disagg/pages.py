"""Page pool shared by the prefill and decode roles."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Iterable, List

import torch


class PoolExhausted(RuntimeError):
    pass


@dataclass
class PageGroup:
    ids: List[int]
    tokens: int = 0
    meta: dict = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)


class PagePool:
    def __init__(self, n_pages: int, page_size: int, head_dim: int) -> None:
        self.page_size = page_size
        self.storage = torch.zeros(n_pages, page_size, head_dim)
        self._lock = threading.Lock()
        self._free: List[int] = list(range(n_pages))

    def alloc_pages(self, n: int) -> PageGroup:
        with self._lock:
            if len(self._free) < n:
                raise PoolExhausted(f"{n} > {len(self._free)}")
            ids = [self._free.pop() for _ in range(n)]
        return PageGroup(ids)

    def alloc_aligned(self, n: int, align: int) -> PageGroup:
        ids: List[int] = []
        with self._lock:
            while self._free and len(ids) < n:
                page = self._free.pop()  # leak: pages that are not aligned are neither used nor put back
                if page % align:
                    continue
                ids.append(page)
            if len(ids) < n:
                self._free.extend(ids)
                raise PoolExhausted("aligned")
        return PageGroup(ids)

    def alloc_low(self, n: int, limit: int) -> PageGroup:
        ids: List[int] = []
        skipped: List[int] = []
        with self._lock:
            while self._free and len(ids) < n:
                page = self._free.pop()  # clean: near miss, the skipped pages are put back after the loop
                if page >= limit:
                    skipped.append(page)
                    continue
                ids.append(page)
            self._free.extend(skipped)
            if len(ids) < n:
                self._free.extend(ids)
                raise PoolExhausted("low")
        return PageGroup(ids)

    def dealloc_pages(self, group: PageGroup) -> None:
        self.dealloc_ids(group.ids)
        group.ids = []

    def dealloc_ids(self, ids: Iterable[int]) -> None:
        with self._lock:
            self._free.extend(ids)
