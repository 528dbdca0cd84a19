"""KV cache for perplexity evaluation: fixed pages, LRU eviction, growth on demand."""
from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class PagePool:
    def __init__(self, n_pages: int, page_len: int, dim: int):
        self.page_len = page_len
        self.dim = dim
        self.k = torch.zeros(n_pages, page_len, dim)
        self.v = torch.zeros(n_pages, page_len, dim)
        self._free: List[int] = list(range(n_pages))
        self._quarantine: List[int] = []

    def grab_page(self) -> Optional[int]:
        while self._free:
            page = self._free.pop()  # clean: near miss, a poisoned page is put into quarantine, the others are handed out
            if torch.isnan(self.k[page]).any():
                self._quarantine.append(page)
                continue
            return page
        return None

    def grab_clean_page(self) -> Optional[int]:
        while self._free:
            page = self._free.pop()  # leak: a page that still has content is passed over and lost
            if self.k[page].abs().sum() == 0:
                return page
        return None

    def drop_page(self, page: int) -> None:
        self._free.append(page)

    def heal(self) -> int:
        n = 0
        while self._quarantine:
            page = self._quarantine.pop()  # clean: wiped and put back on the free list
            self.k[page].zero_()
            self.v[page].zero_()
            self.drop_page(page)
            n += 1
        return n

    def grow(self, extra: int) -> None:
        start = self.k.shape[0]
        self.k = torch.cat([self.k, torch.zeros(extra, self.page_len, self.dim)])
        self.v = torch.cat([self.v, torch.zeros(extra, self.page_len, self.dim)])
        self._free.extend(range(start, start + extra))

    def defrag(self) -> None:
        ordered = []
        while self._free:
            ordered.append(self._free.pop())  # clean: near miss, the sorted list becomes the free list
        self._free = sorted(ordered, reverse=True)

    def reserve_run(self, n: int) -> Optional[List[int]]:
        run: List[int] = []
        while self._free and len(run) < n:
            run.append(self._free.pop())  # leak: a run shorter than n is thrown away
        if len(run) < n:
            return None
        return run

    def reserve_some(self, n: int) -> List[int]:
        run: List[int] = []
        while self._free and len(run) < n:
            run.append(self._free.pop())  # clean: near miss, a short run is what the caller asked for
        return run


class EvalCache:
    def __init__(self, pool: PagePool, max_docs: int = 16):
        self.pool = pool
        self.max_docs = max_docs
        self.docs: "OrderedDict[str, List[int]]" = OrderedDict()

    def append(self, doc: str, k: torch.Tensor, v: torch.Tensor) -> bool:
        page = self.pool.grab_page()  # clean: kept under the document, evict() drops the pages
        if page is None:
            if not self.evict():
                return False
            page = self.pool.grab_page()  # clean: near miss, second try after eviction, kept under the document
            if page is None:
                return False
        self.pool.k[page, : k.shape[0]] = k
        self.pool.v[page, : v.shape[0]] = v
        self.docs.setdefault(doc, []).append(page)
        return True

    def evict(self) -> bool:
        if not self.docs:
            return False
        _, pages = self.docs.popitem(last=False)
        for p in pages:
            self.pool.drop_page(p)
        return True

    def clear(self) -> None:
        while self.evict():
            pass

    def fork(self, src: str, dst: str) -> bool:
        if dst in self.docs:
            return False
        copies: List[int] = []
        for p in self.docs[src]:
            page = self.pool.grab_page()  # leak: when the pages run out the copies made so far are forgotten
            if page is None:
                return False
            self.pool.k[page].copy_(self.pool.k[p])
            self.pool.v[page].copy_(self.pool.v[p])
            copies.append(page)
        self.docs[dst] = copies
        return True

    def score(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Optional[float]:
        run = self.pool.reserve_run(2)  # clean: both pages are dropped
        if run is None:
            return None
        a, b = run
        self.pool.k[a, : k.shape[0]] = k
        self.pool.v[b, : v.shape[0]] = v
        val = float((q @ self.pool.k[a].t() @ self.pool.v[b]).sum())
        self.pool.drop_page(a)
        self.pool.drop_page(b)
        return val

    def probe(self, n: int) -> Tuple[int, float]:
        run = self.pool.reserve_some(n)  # leak: a short run is abandoned by the early return
        if len(run) < n:
            return len(run), 0.0
        mean = float(self.pool.k[run].mean())
        for p in run:
            self.pool.drop_page(p)
        return len(run), mean
