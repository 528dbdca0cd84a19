"""Hash -> page cache. The cache owns one reference on every page it lists."""
from __future__ import annotations

from collections import OrderedDict
from typing import Iterator

from .pages import PagePool


def block_hashes(tokens: list[int], size: int) -> Iterator[int]:
    h = 0
    for i in range(0, len(tokens) - size + 1, size):
        h = hash((h, tuple(tokens[i:i + size])))
        yield h


class PrefixCache:
    def __init__(self, pool: PagePool):
        self.pool = pool
        self._by_hash: OrderedDict[int, int] = OrderedDict()

    def lookup(self, tokens: list[int]) -> list[int]:
        """Pages of the longest cached prefix, with a reference for the caller."""
        pages = []
        for h in block_hashes(tokens, self.pool.page_size):
            page = self._by_hash.get(h)
            if page is None:
                break
            self._by_hash.move_to_end(h)
            pages.append(self.pool.incref(page))  # clean: in the list that is returned
        return pages

    def store(self, tokens: list[int], pages: list[int]) -> None:
        for h, page in zip(block_hashes(tokens, self.pool.page_size), pages):
            if h in self._by_hash:
                continue
            self._by_hash[h] = self.pool.incref(page)  # clean: near miss, a listed hash is skipped and evict() drops the rest

    def evict(self, want: int) -> int:
        before = len(self.pool)
        while self._by_hash and len(self.pool) - before < want:
            _, page = self._by_hash.popitem(last=False)
            self.pool.decref(page)
        return len(self.pool) - before


class PinnedPrompts:
    """System prompts by name, out of reach of eviction."""

    def __init__(self, pool: PagePool):
        self.pool = pool
        self._pins: dict[str, list[int]] = {}

    def set(self, name: str, pages: list[int]) -> None:
        self._pins[name] = [self.pool.incref(p) for p in pages]  # leak: setting a name again drops the references of its pages before

    def unset(self, name: str) -> None:
        self.pool.decref_all(self._pins.pop(name, ()))
