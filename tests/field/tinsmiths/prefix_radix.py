"""Prefix cache over hashed KV pages. Nodes are pinned while a request reads them."""
from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

_tick = itertools.count()


class PageStore:
    """Heap of page ids, lowest first."""

    def __init__(self, pages: int) -> None:
        self._heap = list(range(pages))
        heapq.heapify(self._heap)

    def checkout(self) -> Optional[int]:
        return heapq.heappop(self._heap) if self._heap else None

    def checkin(self, page: int) -> None:
        heapq.heappush(self._heap, page)

    def checkout_batch(self, n: int) -> List[int]:
        """Up to n pages."""
        out: List[int] = []
        for _ in range(n):
            p = self.checkout()  # clean: a short list is the caller's too
            if p is None:
                break
            out.append(p)
        return out


class Node:
    __slots__ = ("key", "page", "parent", "children", "pins", "stamp", "stale")

    def __init__(self, key: Tuple[int, ...], page: int, parent: Optional["Node"]) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: Dict[Tuple[int, ...], Node] = {}
        self.pins = 0
        self.stamp = next(_tick)
        self.stale = False


class RadixCache:
    def __init__(self, store: PageStore, page_len: int) -> None:
        self.store = store
        self.page_len = page_len
        self.root = Node((), -1, None)
        self._mu = threading.RLock()
        self._held: Dict[str, Node] = {}
        self._watch: Dict[str, Node] = {}
        self.hits = 0

    def _walk(self, tokens: Sequence[int]) -> Node:
        node = self.root
        for i in range(0, len(tokens) - self.page_len + 1, self.page_len):
            nxt = node.children.get(tuple(tokens[i:i + self.page_len]))
            if nxt is None:
                break
            nxt.stamp = next(_tick)
            node = nxt
        return node

    def pin(self, tokens: Sequence[int]) -> Optional[Node]:
        """Deepest match with one count on it, None where nothing matches."""
        with self._mu:
            node = self._walk(tokens)
            if node is self.root:
                return None
            node.pins += 1
            self.hits += 1
            return node

    def unpin(self, node: Node) -> None:
        with self._mu:
            node.pins -= 1

    def begin(self, rid: str, tokens: Sequence[int]) -> int:
        node = self.pin(tokens)  # clean: kept in _held until end()
        if node is None:
            return 0
        prev = self._held.pop(rid, None)
        if prev is not None:
            self.unpin(prev)
        self._held[rid] = node
        return self._depth(node)

    def extend(self, rid: str, tokens: Sequence[int]) -> int:
        node = self.pin(tokens)  # leak: not unpinned when the match did not get deeper
        if node is None:
            return 0
        old = self._held.get(rid)
        if old is not None and self._depth(node) <= self._depth(old):
            return self._depth(old)
        self._held[rid] = node
        if old is not None:
            self.unpin(old)
        return self._depth(node)

    def end(self, rid: str) -> None:
        node = self._held.pop(rid, None)
        if node is not None:
            self.unpin(node)

    def _depth(self, node: Node) -> int:
        d = 0
        while node.parent is not None:
            d += 1
            node = node.parent
        return d

    def cached_tokens(self, tokens: Sequence[int]) -> int:
        node = self.pin(tokens)  # clean: unpinned after the depth is read
        if node is None:
            return 0
        n = self._depth(node) * self.page_len
        self.unpin(node)
        return n

    def export_pages(self, tokens: Sequence[int]) -> List[int]:
        node = self.pin(tokens)  # leak: not unpinned when the node is stale
        if node is None:
            return []
        if node.stale:
            return []
        pages: List[int] = []
        cur: Optional[Node] = node
        while cur is not None and cur.parent is not None:
            pages.append(cur.page)
            cur = cur.parent
        self.unpin(node)
        return pages[::-1]

    @contextlib.contextmanager
    def reading(self, tokens: Sequence[int]) -> Iterator[Optional[Node]]:
        node = self.pin(tokens)  # clean: unpinned in finally when there was a match
        try:
            yield node
        finally:
            if node is not None:
                self.unpin(node)

    def score(self, prompts: Sequence[Sequence[int]]) -> List[int]:
        out = []
        for p in prompts:
            with self.reading(p) as node:  # clean: a context manager
                if node is None:
                    out.append(0)
                    continue
                out.append(self._depth(node))
        return out

    def best_of(self, prompts: Sequence[Sequence[int]]) -> Optional[Node]:
        best: Optional[Node] = None
        for p in prompts:
            node = self.pin(p)  # leak: the former best loses its pin by rebinding
            if node is None:
                continue
            if best is None or self._depth(node) > self._depth(best):
                best = node
            else:
                self.unpin(node)
        return best

    def oldest_of(self, prompts: Sequence[Sequence[int]]) -> Optional[Node]:
        best: Optional[Node] = None
        for p in prompts:
            node = self.pin(p)  # clean: near miss, the loser of each comparison is unpinned
            if node is None:
                continue
            if best is not None and best.stamp <= node.stamp:
                self.unpin(node)
                continue
            if best is not None:
                self.unpin(best)
            best = node
        return best

    def insert(self, tokens: Sequence[int], kv: Any) -> int:
        added = 0
        with self._mu:
            node = self.root
            for i in range(0, len(tokens) - self.page_len + 1, self.page_len):
                key = tuple(tokens[i:i + self.page_len])
                child = node.children.get(key)
                if child is None:
                    page = self.store.checkout()  # clean: owned by the new node that evict() takes apart
                    if page is None:
                        return added
                    child = node.children[key] = Node(key, page, node)
                    kv.write(page, i)
                    added += 1
                node = child
        return added

    def insert_leaf(self, parent: Node, key: Tuple[int, ...]) -> Node:
        page = self.store.checkout()  # leak: not checked in when another thread inserted the key first
        if page is None:
            raise MemoryError("no pages")
        with self._mu:
            child = parent.children.get(key)
            if child is not None:
                return child
            child = Node(key, page, parent)
            parent.children[key] = child
            return child

    def insert_chain(self, keys: Sequence[Tuple[int, ...]]) -> bool:
        pages = self.store.checkout_batch(len(keys))  # clean: checked in when short, else one per node
        if len(pages) < len(keys):
            for p in pages:
                self.store.checkin(p)
            return False
        with self._mu:
            node = self.root
            for key, page in zip(keys, pages):
                if key in node.children:
                    self.store.checkin(page)
                else:
                    node.children[key] = Node(key, page, node)
                node = node.children[key]
        return True

    def prefetch(self, n: int, loader) -> int:
        pages = self.store.checkout_batch(n)  # leak: pages whose load fails are not checked in
        loaded = 0
        for p in pages:
            key = loader.load_into(p)
            if key is None:
                continue
            with self._mu:
                if key in self.root.children:
                    self.store.checkin(p)
                else:
                    self.root.children[key] = Node(key, p, self.root)
                    loaded += 1
        return loaded

    def watch(self, rid: str, tokens: Sequence[int]) -> None:
        if rid in self._watch:
            return
        node = self.pin(tokens)  # clean: near miss, put in _watch, which unwatch_all() unpins
        if node is not None:
            self._watch[rid] = node

    def unwatch_all(self) -> None:
        while self._watch:
            _, node = self._watch.popitem()
            self.unpin(node)

    def evict(self, want: int) -> int:
        got = 0
        with self._mu:
            leaves = [n for n in self._iter(self.root) if not n.children and n.pins == 0 and n is not self.root]
            for n in sorted(leaves, key=lambda x: x.stamp)[:want]:
                del n.parent.children[n.key]
                self.store.checkin(n.page)
                got += 1
        return got

    def _iter(self, node: Node) -> Iterator[Node]:
        yield node
        for c in list(node.children.values()):
            yield from self._iter(c)
