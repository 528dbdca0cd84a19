"""Radix-style prefix cache: nodes hold KV pages, requests hold locks on nodes."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

PAGE = 16


class PagePool:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def alloc(self, n: int) -> Optional[List[int]]:
        if len(self._free) < n:
            return None
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)

    def available(self) -> int:
        return len(self._free)


class Node:
    __slots__ = ("key", "pages", "children", "parent", "locks", "last_used")

    def __init__(self, key: Tuple[int, ...], pages: List[int], parent: Optional["Node"]) -> None:
        self.key = key
        self.pages = pages
        self.children: Dict[Tuple[int, ...], Node] = {}
        self.parent = parent
        self.locks = 0
        self.last_used = time.monotonic()


class PrefixTree:
    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.root = Node((), [], None)
        self.root.locks = 1

    def lock(self, node: Node) -> None:
        walk: Optional[Node] = node
        while walk is not None:
            walk.locks += 1
            walk = walk.parent

    def unlock(self, node: Node) -> None:
        walk: Optional[Node] = node
        while walk is not None:
            walk.locks -= 1
            walk = walk.parent

    def match(self, tokens: Sequence[int]) -> Tuple[Node, List[int]]:
        node, pages = self.root, []
        for i in range(0, len(tokens) - PAGE + 1, PAGE):
            child = node.children.get(tuple(tokens[i : i + PAGE]))
            if child is None:
                break
            child.last_used = time.monotonic()
            pages.extend(child.pages)
            node = child
        return node, pages

    def match_and_lock(self, tokens: Sequence[int]) -> Tuple[Node, List[int]]:
        node, pages = self.match(tokens)
        self.lock(node)  # clean: handed on to the caller with the node
        return node, pages

    def insert(self, node: Node, tokens: Sequence[int], pages: List[int]) -> Tuple[Node, List[int]]:
        """Hangs full pages below `node`; returns the new tip and the pages it did not keep."""
        kept = 0
        for i in range(0, len(tokens) - PAGE + 1, PAGE):
            key = tuple(tokens[i : i + PAGE])
            child = node.children.get(key)
            if child is not None:
                node = child
                continue
            child = Node(key, [pages[i // PAGE]], node)
            node.children[key] = child
            node = child
            kept += 1
        spare = [p for p in pages if p not in self._owned(node)]
        return node, spare

    def _owned(self, node: Node) -> List[int]:
        out: List[int] = []
        walk: Optional[Node] = node
        while walk is not None:
            out.extend(walk.pages)
            walk = walk.parent
        return out

    def _leaves(self, node: Node) -> Iterator[Node]:
        for child in node.children.values():
            if child.children:
                yield from self._leaves(child)
            else:
                yield child

    def evict(self, want: int) -> int:
        freed = 0
        for leaf in sorted(self._leaves(self.root), key=lambda n: n.last_used):
            if freed >= want:
                break
            if leaf.locks == 0 and leaf.parent is not None:
                del leaf.parent.children[leaf.key]
                self.pool.free(leaf.pages)
                freed += len(leaf.pages)
        return freed

    def alloc_or_evict(self, n: int) -> Optional[List[int]]:
        pages = self.pool.alloc(n)  # clean: handed on to the caller
        if pages is not None:
            return pages
        self.evict(n - self.pool.available())
        return self.pool.alloc(n)  # clean: near miss, the second try goes to the caller as well


@dataclass
class Req:
    rid: int
    tokens: List[int]
    node: Optional[Node] = None
    pages: List[int] = field(default_factory=list)
    chunk_pages: List[int] = field(default_factory=list)


class CacheController:
    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.live: Dict[int, Req] = {}

    def start(self, req: Req) -> bool:
        node, cached = self.tree.match_and_lock(req.tokens)  # leak: without pages the request is refused but its node stays locked
        need = -(-(len(req.tokens) - len(cached) * PAGE) // PAGE)
        pages = self.tree.alloc_or_evict(need)  # clean: near miss, kept in the request, finish inserts or frees them
        if pages is None:
            return False
        req.node, req.pages = node, pages
        self.live[req.rid] = req
        return True

    def extend_chunk(self, req: Req, n: int) -> bool:
        pages = self.tree.alloc_or_evict(n)  # leak: chunk_pages are freed by finish but not by abort
        if pages is None:
            return False
        req.chunk_pages.extend(pages)
        return True

    def rematch(self, req: Req) -> int:
        node, cached = self.tree.match_and_lock(req.tokens)  # clean: near miss, the lock on the previous node is given up
        if req.node is not None:
            self.tree.unlock(req.node)
        req.node = node
        return len(cached)

    def deepen(self, req: Req) -> int:
        node, cached = self.tree.match(req.tokens)
        if node is not req.node:
            self.tree.lock(node)  # leak: the node locked before is overwritten and stays locked
            req.node = node
        return len(cached)

    def finish(self, rid: int) -> None:
        req = self.live.pop(rid)
        assert req.node is not None
        _, spare = self.tree.insert(req.node, req.tokens[self._depth(req.node) * PAGE :], req.pages)
        self.tree.pool.free(spare)
        self.tree.pool.free(req.chunk_pages)
        req.chunk_pages = []
        self.tree.unlock(req.node)
        req.node = None

    def abort(self, rid: int) -> None:
        req = self.live.pop(rid, None)
        if req is None:
            return
        self.tree.pool.free(req.pages)
        req.pages = []
        if req.node is not None:
            self.tree.unlock(req.node)
            req.node = None

    def _depth(self, node: Node) -> int:
        depth = 0
        while node.parent is not None:
            node, depth = node.parent, depth + 1
        return depth

    def warm(self, prompts: List[List[int]]) -> int:
        stored = 0
        for tokens in prompts:
            pages = self.tree.alloc_or_evict(len(tokens) // PAGE)  # leak: spare pages of prompts already cached are dropped
            if pages is None:
                break
            tip, _ = self.tree.insert(self.tree.root, tokens, pages)
            stored += self._depth(tip)
        return stored
