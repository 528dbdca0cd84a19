"""Draft/verify loop with scratch pages for the proposed tokens."""
from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

logger = logging.getLogger(__name__)


class PagePool(Protocol):
    def alloc_pages(self, n: int) -> list[int]: ...
    def free_pages(self, pages: Iterable[int]) -> None: ...


class ListPagePool:
    def __init__(self, total: int) -> None:
        self._free = list(range(total))

    def alloc_pages(self, n: int) -> list[int]:
        """May return fewer than n."""
        take, self._free = self._free[:n], self._free[n:]
        return take

    def free_pages(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)


@dataclass
class Draft:
    tokens: list[int]
    pages: list[int]
    logp: float = 0.0


@dataclass
class SeqState:
    tokens: list[int]
    pages: list[int] = field(default_factory=list)


class SpecDecoder:
    def __init__(self, pool: ListPagePool, draft_fn: Callable[[list[int]], int], k: int = 4, page: int = 8) -> None:
        self.pool = pool
        self.draft_fn = draft_fn
        self.k = k
        self.page = page
        self.accepted = 0
        self.rejected = 0

    def propose(self, seq: SeqState) -> Draft | None:
        n = -(-self.k // self.page)
        pages = self.pool.alloc_pages(n)  # clean: near miss, a short answer is freed, else it goes out in the draft
        if len(pages) < n:
            self.pool.free_pages(pages)
            return None
        toks = list(seq.tokens)
        for _ in range(self.k):
            toks.append(self.draft_fn(toks))
        return Draft(toks[len(seq.tokens):], pages)

    def verify(self, seq: SeqState, draft: Draft) -> int:
        n = 0
        for tok in draft.tokens:
            if random.random() < 0.3:
                break
            seq.tokens.append(tok)
            n += 1
        self.accepted += n
        self.rejected += len(draft.tokens) - n
        return n

    def step(self, seq: SeqState) -> int:
        draft = self.propose(seq)  # leak: a full rejection returns 0 and forgets the pages
        if draft is None:
            return 0
        n = self.verify(seq, draft)
        if n == 0:
            return 0
        used = -(-n // self.page)
        seq.pages += draft.pages[:used]
        self.pool.free_pages(draft.pages[used:])
        return n

    def step_split(self, seq: SeqState) -> int:
        draft = self.propose(seq)  # clean: near miss, the pages are split between the sequence and the pool
        if draft is None:
            return 0
        used = -(-self.verify(seq, draft) // self.page)
        keep, back = draft.pages[:used], draft.pages[used:]
        seq.pages.extend(keep)
        self.pool.free_pages(back)
        return used

    def step_truncate(self, seq: SeqState) -> int:
        draft = self.propose(seq)  # leak: the list is cut to the used pages, the tail goes nowhere
        if draft is None:
            return 0
        n = self.verify(seq, draft)
        draft.pages = draft.pages[: -(-n // self.page)]
        seq.pages.extend(draft.pages)
        return n

    def finish(self, seq: SeqState) -> None:
        self.pool.free_pages(seq.pages)
        seq.pages = []

    def tree(self, seq: SeqState, width: int) -> Draft | None:
        best: Draft | None = None
        for _ in range(width):
            d = self.propose(seq)  # leak: a candidate that is not better is dropped with its pages
            if d is None:
                break
            d.logp = -random.random()
            if best is None:
                best = d
            elif d.logp > best.logp:
                self.pool.free_pages(best.pages)
                best = d
        return best

    def tree_sorted(self, seq: SeqState, width: int) -> Draft | None:
        drafts: list[Draft] = []
        for _ in range(width):
            d = self.propose(seq)  # clean: near miss, all but the returned one are freed
            if d is None:
                break
            drafts.append(d)
        if not drafts:
            return None
        drafts.sort(key=lambda d: d.logp)
        for d in drafts[:-1]:
            self.pool.free_pages(d.pages)
        return drafts[-1]

    def run_tree(self, seq: SeqState, width: int) -> int:
        best = self.tree_sorted(seq, width)  # clean: pages are freed after verification
        if best is None:
            return 0
        n = self.verify(seq, best)
        self.pool.free_pages(best.pages)
        return n

    def peek_tree(self, seq: SeqState, width: int) -> list[int]:
        best = self.tree(seq, width)  # leak: only the tokens of the draft are used
        return best.tokens if best else []

    def scratch_logits(self, vocab: int) -> torch.Tensor:
        pages = self.pool.alloc_pages(1)  # clean: freed in finally
        try:
            return torch.full((len(pages), vocab), -1.0)
        finally:
            self.pool.free_pages(pages)

    def bonus(self, seq: SeqState, n: int) -> None:
        pages = self.pool.alloc_pages(n)  # leak: even pages only are moved into the sequence, odd ones are filtered away
        seq.pages.extend(p for p in pages if p % 2 == 0)
