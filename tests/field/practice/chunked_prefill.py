"""Chunked prefill with a token budget and hybrid (full + sliding) cache groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Iterable, Sequence

import logging

import torch

logger = logging.getLogger(__name__)
NULL_PAGE: Final = -1


class PageTable:
    """Pages of one group; free pages are a linked list in an int tensor."""

    def __init__(self, pages: int) -> None:
        self.link = torch.arange(1, pages + 1)
        self.link[-1] = NULL_PAGE
        self.head = 0
        self.n_free = pages

    def take_page(self) -> int:
        if self.head == NULL_PAGE:
            return NULL_PAGE
        p = self.head
        self.head = int(self.link[p])
        self.n_free -= 1
        return p

    def return_page(self, p: int) -> None:
        self.link[p] = self.head
        self.head = p
        self.n_free += 1


@dataclass
class GroupPages:
    full: list[int] = field(default_factory=list)
    sliding: list[int] = field(default_factory=list)


@dataclass
class Sequence_:
    sid: int
    tokens: list[int]
    done: int = 0
    pages: GroupPages = field(default_factory=GroupPages)


class HybridAllocator:
    def __init__(self, full: PageTable, sliding: PageTable, window_pages: int) -> None:
        self.full, self.sliding, self.window_pages = full, sliding, window_pages

    def extend(self, seq: Sequence_) -> bool:
        f = self.full.take_page()  # clean: near miss, returned when the other group has none
        if f == NULL_PAGE:
            return False
        s = self.sliding.take_page()  # clean: appended, shrink() and drop_all() return it
        if s == NULL_PAGE:
            self.full.return_page(f)
            return False
        seq.pages.full.append(f)
        seq.pages.sliding.append(s)
        return True

    def shrink(self, seq: Sequence_) -> None:
        while len(seq.pages.sliding) > self.window_pages:
            self.sliding.return_page(seq.pages.sliding.pop(0))

    def drop_all(self, seq: Sequence_) -> None:
        for p in seq.pages.full:
            self.full.return_page(p)
        for p in seq.pages.sliding:
            self.sliding.return_page(p)
        seq.pages = GroupPages()

    def extend_many(self, seq: Sequence_, n: int) -> bool:
        got: list[int] = []
        for _ in range(n):
            p = self.full.take_page()  # leak: only the last page is returned when the group runs out
            if p == NULL_PAGE:
                if got:
                    self.full.return_page(got[-1])
                return False
            got.append(p)
        seq.pages.full.extend(got)
        return True

    def extend_some(self, seq: Sequence_, n: int) -> int:
        k = 0
        while k < n:
            p = self.full.take_page()  # clean: near miss, what was had so far is the sequence's already
            if p == NULL_PAGE:
                break
            seq.pages.full.append(p)
            k += 1
        return k

    def replace_last(self, seq: Sequence_) -> bool:
        p = self.full.take_page()  # leak: a sequence without pages is refused after the take
        if p == NULL_PAGE or not seq.pages.full:
            return False
        old = seq.pages.full[-1]
        seq.pages.full[-1] = p
        self.full.return_page(old)
        return True

    def dry_run(self, n: int) -> bool:
        pages = [self.full.take_page() for _ in range(n)]  # clean: near miss, every page that is one goes back
        enough = NULL_PAGE not in pages
        for p in pages:
            if p != NULL_PAGE:
                self.full.return_page(p)
        return enough

    def dry_run_sliding(self, n: int) -> bool:
        pages = [self.sliding.take_page() for _ in range(n)]  # leak: pages are returned only if there were enough
        if NULL_PAGE in pages:
            return False
        for p in pages:
            self.sliding.return_page(p)
        return True


class ChunkedPrefill:
    def __init__(self, alloc: HybridAllocator, page: int, budget: int) -> None:
        self.alloc, self.page, self.budget = alloc, page, budget
        self.active: dict[int, Sequence_] = {}
        self.scratch_page: int = NULL_PAGE

    def step(self, seqs: Iterable[Sequence_]) -> list[int]:
        left = self.budget
        ran = []
        for seq in seqs:
            take = min(left, self.page, len(seq.tokens) - seq.done)
            if take <= 0:
                continue
            if not self.alloc.extend(seq):
                break
            self.active[seq.sid] = seq
            seq.done += take
            left -= take
            self.alloc.shrink(seq)
            ran.append(seq.sid)
        return ran

    def finish(self, sid: int) -> None:
        seq = self.active.pop(sid, None)
        if seq:
            self.alloc.drop_all(seq)

    def ensure_scratch(self) -> int:
        if self.scratch_page == NULL_PAGE:
            self.scratch_page = self.alloc.full.take_page()  # clean: near miss, taken once and returned in stop()
        return self.scratch_page

    def stop(self) -> None:
        for sid in list(self.active):
            self.finish(sid)
        if self.scratch_page != NULL_PAGE:
            self.alloc.full.return_page(self.scratch_page)
            self.scratch_page = NULL_PAGE

    def probe(self, data: Sequence[torch.Tensor]) -> list[float]:
        res = []
        for t in islice(data, self.budget):
            p = self.alloc.full.take_page()  # leak: empty tensors are jumped over after the take
            if p == NULL_PAGE:
                break
            if t.numel() == 0:
                logger.debug("empty tensor for page %d", p)
                continue
            res.append(float(t.mean()) + p)
            self.alloc.full.return_page(p)
        return res

    def defrag(self, seq: Sequence_) -> int:
        moved = 0
        for i, old in enumerate(seq.pages.full):
            new = self.alloc.full.take_page()  # clean: near miss, either the new or the old page is returned
            if new == NULL_PAGE:
                break
            if new > old:
                self.alloc.full.return_page(new)
                continue
            seq.pages.full[i] = new
            self.alloc.full.return_page(old)
            moved += 1
        return moved
