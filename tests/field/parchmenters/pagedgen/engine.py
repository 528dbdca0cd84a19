from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Optional

from .pages import PagePool
from .prefix import PrefixCache


@dataclass
class Seq:
    sid: str
    tokens: list[int]
    max_len: int
    pages: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.max_len


class GenEngine:
    def __init__(self, pool: PagePool, cache: PrefixCache, decode: Callable[[Seq], int]):
        self.pool = pool
        self.cache = cache
        self.decode = decode
        self.waiting: deque[Seq] = deque()
        self.running: list[Seq] = []

    def _need(self, n_tokens: int) -> int:
        return -(-n_tokens // self.pool.page_size)

    def _take(self, n: int) -> Optional[list[int]]:
        pages = self.pool.take(n)  # clean: returned to the caller
        if pages is None and self.cache.evict(n):
            return self.pool.take(n)  # clean: returned to the caller
        return pages

    def schedule(self) -> int:
        started = 0
        while self.waiting:
            seq = self.waiting[0]
            hit = self.cache.lookup(seq.tokens)  # leak: references of the hit stay when the rest does not fit
            rest = self._take(self._need(len(seq.tokens) + 1) - len(hit))  # clean: in seq.pages, retire() drops them
            if rest is None:
                break
            self.waiting.popleft()
            seq.pages = hit + rest
            self.running.append(seq)
            started += 1
        return started

    def step(self) -> list[Seq]:
        finished = []
        for seq in list(self.running):
            if self._need(len(seq.tokens) + 1) > len(seq.pages):
                page = self._take(1)  # clean: added to seq.pages
                if page is None:
                    self._preempt(seq)
                    continue
                seq.pages += page
            seq.tokens.append(self.decode(seq))
            if seq.done:
                finished.append(seq)
                self.retire(seq)
        return finished

    def _preempt(self, seq: Seq) -> None:
        self.running.remove(seq)
        self.pool.decref_all(seq.pages)
        seq.pages = []
        self.waiting.append(seq)

    def retire(self, seq: Seq) -> None:
        self.running.remove(seq)
        self.cache.store(seq.tokens, seq.pages)
        self.pool.decref_all(seq.pages)
        seq.pages = []

    def branch(self, seq: Seq, n: int) -> list[Seq]:
        """``n`` continuations of a running sequence, with a tail page of their own each."""
        children = []
        for i in range(n):
            tail = self._take(1)  # clean: in the child's pages
            if tail is None:
                break
            pages = [self.pool.incref(p) for p in seq.pages[:-1]]  # clean: near miss, taken after the tail is sure and kept by the child
            child = Seq(f"{seq.sid}.{i}", list(seq.tokens), seq.max_len, pages + tail)
            self.running.append(child)
            children.append(child)
        return children

    def cached_tokens(self, tokens: list[int]) -> int:
        return len(self.cache.lookup(tokens)) * self.pool.page_size  # leak: the pages are only counted, their references are dropped

    def hit_rate(self, prompts: list[list[int]]) -> float:
        hit = total = 0
        for tokens in prompts:
            pages = self.cache.lookup(tokens)  # clean: references are dropped after counting
            hit += len(pages) * self.pool.page_size
            total += len(tokens)
            self.pool.decref_all(pages)
        return hit / max(total, 1)

    def prefill_only(self, tokens: list[int], embed: Callable) -> Optional[list[float]]:
        pages = self._take(self._need(len(tokens)))  # leak: a vector of zeros is returned on before the pages go back
        if pages is None:
            return None
        vec = embed(tokens, pages)
        if not any(vec):
            return None
        self.pool.decref_all(pages)
        return vec
