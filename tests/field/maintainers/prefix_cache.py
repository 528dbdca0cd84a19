"""Prefix cache: reference-counted nodes over a pool of pages."""
from __future__ import annotations

from typing import Dict, Iterable, List, Optional, Tuple

Key = Tuple[int, ...]


class PagePool:
    def __init__(self, n: int):
        self._idle = set(range(n))

    def take(self) -> Optional[int]:
        if self._idle:
            return self._idle.pop()  # clean: the caller gets it
        return None

    def give(self, page: int) -> None:
        self._idle.add(page)


class Node:
    def __init__(self, key: Key, page: int):
        self.key = key
        self.page = page
        self.refs = 0

    def pin(self) -> "Node":
        self.refs += 1
        return self

    def unpin(self) -> None:
        self.refs -= 1


class PrefixCache:
    def __init__(self, pages: PagePool, chunk: int = 16):
        self.pages = pages
        self.chunk = chunk
        self.nodes: Dict[Key, Node] = {}
        self.active: Dict[str, List[Node]] = {}

    def _keys(self, tokens: List[int]) -> Iterable[Key]:
        for end in range(self.chunk, len(tokens) + 1, self.chunk):
            yield tuple(tokens[:end])

    def match(self, rid: str, tokens: List[int]) -> int:
        """Pin the longest cached prefix for request rid."""
        held: List[Node] = []
        for key in self._keys(tokens):
            node = self.nodes.get(key)
            if node is None:
                break
            held.append(node.pin())  # clean: near miss, break comes before the pin; held ends in active, which finish unpins
        self.active.setdefault(rid, []).extend(held)
        return len(held) * self.chunk

    def hit_length(self, tokens: List[int]) -> int:
        """How many tokens are cached (read only)."""
        n = 0
        last: Optional[Node] = None
        for key in self._keys(tokens):
            node = self.nodes.get(key)
            if node is None:
                break
            if last is not None:
                last.unpin()
            last = node.pin()  # leak: the last node of the walk stays pinned at return
            n = len(key)
        return n

    def touch(self, key: Key) -> bool:
        node = self.nodes.get(key)
        if node is None:
            return False
        node.pin()  # clean: near miss, unpinned in finally also on the early return
        try:
            if node.page < 0:
                return False
            self.nodes[key] = self.nodes.pop(key)
            return True
        finally:
            node.unpin()

    def insert(self, rid: str, tokens: List[int]) -> int:
        added = 0
        for key in self._keys(tokens):
            page = self.pages.take()  # leak: continue on a key already cached loses the page
            if page is None:
                return added
            if key in self.nodes:
                continue
            node = Node(key, page)
            self.nodes[key] = node
            self.active.setdefault(rid, []).append(node.pin())  # clean: finish unpins everything in active
            added += 1
        return added

    def insert_one(self, key: Key) -> bool:
        if key in self.nodes:
            return True
        page = self.pages.take()  # clean: near miss, nothing was taken on the evict-and-retry path before
        if page is None:
            if not self.evict_one():
                return False
            page = self.pages.take()  # clean: near miss, replaces a None and goes to the node
            if page is None:
                return False
        self.nodes[key] = Node(key, page)
        return True

    def replace(self, key: Key) -> bool:
        """Give the node of key a fresh page (after an ECC error the old one is recycled)."""
        node = self.nodes.get(key)
        if node is None:
            return False
        fresh = self.pages.take()  # leak: the busy path returns with the fresh page
        if fresh is None:
            return False
        if node.refs > 0:
            return False
        old, node.page = node.page, fresh
        self.pages.give(old)
        return True

    def evict_one(self) -> bool:
        for key, node in list(self.nodes.items()):
            if node.refs == 0:
                del self.nodes[key]
                self.pages.give(node.page)
                return True
        return False

    def finish(self, rid: str) -> None:
        for node in self.active.pop(rid, []):
            node.unpin()


class Session:
    """A chat that holds its last prefix node between turns."""

    def __init__(self, cache: PrefixCache):
        self.cache = cache
        self.anchor: Optional[Node] = None
        self.root: Optional[Node] = None

    def open(self, key: Key) -> bool:
        node = self.cache.nodes.get(key)
        if node is None:
            return False
        if self.root is not None:
            self.root.unpin()
        self.root = node.pin()  # clean: near miss, the earlier root is unpinned first; close unpins this one
        return True

    def advance(self, key: Key) -> None:
        node = self.cache.nodes.get(key)
        if node is not None:
            self.anchor = node.pin()  # leak: overwrites the anchor of the previous turn, which stays pinned

    def close(self) -> None:
        if self.anchor is not None:
            self.anchor.unpin()
            self.anchor = None
        if self.root is not None:
            self.root.unpin()
            self.root = None
