"""Sliding-window KV cache with match-based eviction policies."""
from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NewType

import torch

PageId = NewType("PageId", int)
logger = logging.getLogger(__name__)


class Policy(Enum):
    KEEP = auto()
    DROP = auto()
    SINK = auto()


@dataclass(frozen=True, slots=True)
class PageMeta:
    page: PageId
    first: int
    policy: Policy = Policy.KEEP


class PageHeap:
    def __init__(self, n: int, page: int, dim: int) -> None:
        self.kv = torch.zeros(n, page, dim)
        self._free: set[PageId] = {PageId(i) for i in range(n)}

    def acquire_page(self) -> PageId:
        return self._free.pop()  # clean: goes to the caller

    def acquire_page_or(self, default: PageId | None = None) -> PageId | None:
        return self._free.pop() if self._free else default  # clean: goes to the caller

    def release_page(self, p: PageId) -> None:
        self._free.add(p)

    def __bool__(self) -> bool:
        return bool(self._free)


class Window(MutableMapping[int, PageMeta]):
    """Maps page start positions to pages; deleting a key releases the page."""

    def __init__(self, heap: PageHeap, size: int) -> None:
        self.heap = heap
        self.size = size
        self._m: dict[int, PageMeta] = {}

    def __getitem__(self, k: int) -> PageMeta:
        return self._m[k]

    def __setitem__(self, k: int, v: PageMeta) -> None:
        old = self._m.get(k)
        if old is not None and old.page != v.page:
            self.heap.release_page(old.page)
        self._m[k] = v

    def __delitem__(self, k: int) -> None:
        self.heap.release_page(self._m.pop(k).page)

    def __iter__(self) -> Iterator[int]:
        return iter(self._m)

    def __len__(self) -> int:
        return len(self._m)

    def append(self, first: int, policy: Policy) -> bool:
        page = self.heap.acquire_page_or()  # leak: Policy.DROP returns False without a release
        if page is None:
            return False
        match policy:
            case Policy.DROP:
                return False
            case Policy.SINK:
                self[first] = PageMeta(page, first, Policy.SINK)
            case _:
                self[first] = PageMeta(page, first)
        return True

    def append_strict(self, first: int, policy: Policy) -> bool:
        page = self.heap.acquire_page_or()  # clean: near miss, every case keeps or releases the page
        if page is None:
            return False
        match policy:
            case Policy.DROP:
                self.heap.release_page(page)
                return False
            case Policy.SINK | Policy.KEEP:
                self[first] = PageMeta(page, first, policy)
        return True

    def slide(self, pos: int) -> int:
        old = [k for k, m in self._m.items() if k + self.size <= pos and m.policy is not Policy.SINK]
        for k in old:
            del self[k]
        return len(old)

    def mark_sink(self, first: int) -> None:
        self[first] = replace(self[first], policy=Policy.SINK)

    def compact(self, first: int) -> None:
        fresh = self.heap.acquire_page()  # clean: near miss, __setitem__ releases the page it replaces
        self.heap.kv[fresh].copy_(self.heap.kv[self[first].page])
        self[first] = PageMeta(fresh, first)

    def compact_if(self, first: int) -> bool:
        fresh = self.heap.acquire_page()  # leak: an absent position returns False with the page
        if first not in self:
            return False
        self.heap.kv[fresh].copy_(self.heap.kv[self[first].page])
        self[first] = PageMeta(fresh, first)
        return True

    def extend(self, first: int, n: int) -> int:
        i = 0
        while i < n and (page := self.heap.acquire_page_or()) is not None:  # clean: near miss, the order of the tests takes no page beyond n
            self[first + i * self.heap.kv.shape[1]] = PageMeta(page, first)
            i += 1
        return i

    def extend_greedy(self, first: int, n: int) -> int:
        i = 0
        while (page := self.heap.acquire_page_or()) is not None and i < n:  # leak: the page taken when i reaches n is not stored
            self[first + i * self.heap.kv.shape[1]] = PageMeta(page, first)
            i += 1
        return i


def attend(w: Window, q: torch.Tensor) -> torch.Tensor:
    scratch = w.heap.acquire_page()  # clean: released after use
    buf = w.heap.kv[scratch]
    buf.zero_()
    for meta in w.values():
        buf += w.heap.kv[meta.page]
    out = torch.softmax(q @ buf.T, -1) @ buf
    w.heap.release_page(scratch)
    return out


def attend_recent(w: Window, q: torch.Tensor, pos: int) -> torch.Tensor:
    scratch = w.heap.acquire_page()  # leak: an empty window returns q before the release
    buf = w.heap.kv[scratch].zero_()
    recent = [m for m in w.values() if m.first > pos]
    if not recent:
        return q
    for m in recent:
        buf += w.heap.kv[m.page]
    out = q @ buf.T
    w.heap.release_page(scratch)
    return out


def borrow_or_make(heap: PageHeap) -> tuple[torch.Tensor, PageId | None]:
    page = heap.acquire_page_or()  # clean: the id goes out with the tensor
    if page is None:
        return torch.zeros_like(heap.kv[0]), None
    return heap.kv[page], page


def prefix_sum(heap: PageHeap, xs: list[torch.Tensor]) -> torch.Tensor:
    buf, page = borrow_or_make(heap)  # clean: near miss, released whenever there is an id
    buf.zero_()
    for x in xs:
        buf += x
    out = buf.clone()
    if page is not None:
        heap.release_page(page)
    return out


def prefix_max(heap: PageHeap, xs: list[torch.Tensor]) -> torch.Tensor:
    buf, page = borrow_or_make(heap)  # leak: the id is released only if it is not zero
    buf.fill_(float("-inf"))
    for x in xs:
        torch.maximum(buf, x, out=buf)
    out = buf.clone()
    if page:
        heap.release_page(page)
    return out


def norm(heap: PageHeap, x: torch.Tensor) -> float:
    buf, _ = borrow_or_make(heap)  # leak: the page id is thrown away
    buf.copy_(x)
    return float(buf.norm())
