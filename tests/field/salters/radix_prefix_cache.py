"""Prefix cache as a radix tree over pages. A node with lock_ref > 0 survives eviction."""
from __future__ import annotations

import heapq
import time
from collections import defaultdict
from typing import Iterable, List, Optional, Tuple

PAGE = 16


class PagePool:
    def __init__(self, size: int) -> None:
        self.free_pages = list(range(size))

    def alloc(self, need: int) -> Optional[List[int]]:
        if need > len(self.free_pages):
            return None
        out = self.free_pages[:need]
        self.free_pages = self.free_pages[need:]
        return out

    def free(self, pages: Iterable[int]) -> None:
        self.free_pages.extend(pages)


class TreeNode:
    def __init__(self, parent: Optional["TreeNode"] = None) -> None:
        self.children: dict[tuple, "TreeNode"] = {}
        self.parent = parent
        self.key: tuple = ()
        self.pages: List[int] = []
        self.lock_ref = 0
        self.hits = 0
        self.last_access = time.monotonic()

    def __lt__(self, other: "TreeNode") -> bool:
        return self.last_access < other.last_access


class RadixCache:
    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.root = TreeNode()
        self.root.lock_ref = 1

    # -- locking -------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> TreeNode:
        cur: Optional[TreeNode] = node
        while cur is not None and cur is not self.root:
            cur.lock_ref += 1
            cur = cur.parent
        return node

    def unlock(self, node: TreeNode) -> None:
        cur: Optional[TreeNode] = node
        while cur is not None and cur is not self.root:
            cur.lock_ref -= 1
            cur = cur.parent

    # -- lookup --------------------------------------------------------------------------------

    def match(self, tokens: List[int]) -> Tuple[TreeNode, int]:
        node, depth = self.root, 0
        while True:
            page = tuple(tokens[depth * PAGE:(depth + 1) * PAGE])
            if len(page) < PAGE or page not in node.children:
                return node, depth
            node = node.children[page]
            node.last_access = time.monotonic()
            depth += 1

    def match_and_lock(self, tokens: List[int]) -> Tuple[TreeNode, int]:
        """The caller unlocks the node."""
        node, depth = self.match(tokens)
        self.lock(node)  # clean: the locked node is handed to the caller
        return node, depth

    def insert(self, tokens: List[int], skip: int, pages: List[int]) -> TreeNode:
        """Takes over the pages after the first skip; those whose tokens are in the tree are freed."""
        node, depth = self.match(tokens)
        self.pool.free(pages[:depth - skip])
        for i in range(depth, skip + len(pages)):
            child = TreeNode(node)
            child.key = tuple(tokens[i * PAGE:(i + 1) * PAGE])
            child.pages = [pages[i - skip]]
            node.children[child.key] = child
            node = child
        return node

    # -- eviction ------------------------------------------------------------------------------

    def _leaves(self) -> List[TreeNode]:
        out, todo = [], [self.root]
        while todo:
            node = todo.pop()
            if node.children:
                todo.extend(node.children.values())
            elif node is not self.root:
                out.append(node)
        return out

    def evict(self, want: int) -> int:
        heap = [n for n in self._leaves() if n.lock_ref == 0]
        heapq.heapify(heap)
        got = 0
        while heap and got < want:
            node = heapq.heappop(heap)
            got += len(node.pages)
            self.pool.free(node.pages)
            del node.parent.children[node.key]
            if not node.parent.children and node.parent.lock_ref == 0:
                heapq.heappush(heap, node.parent)
        return got

    def alloc_or_evict(self, need: int) -> Optional[List[int]]:
        pages = self.pool.alloc(need)  # clean: returned, or None and asked for again
        if pages is None:
            self.evict(need)
            pages = self.pool.alloc(need)  # clean: handed to the caller
        return pages

    def alloc_with_spare(self, need: int) -> Optional[List[int]]:
        """Asks for twice the pages first and keeps what is needed."""
        pages = self.pool.alloc(need * 2)  # leak: the second half is sliced off and never freed
        if pages is None:
            return self.alloc_or_evict(need)  # clean: handed to the caller
        return pages[:need]

    def alloc_aligned(self, need: int, align: int) -> Optional[List[int]]:
        extra = -need % align
        pages = self.alloc_or_evict(need + extra)  # clean: near miss, the surplus is freed
        if pages is None:
            return None
        keep, surplus = pages[:need], pages[need:]
        self.pool.free(surplus)
        return keep


class Req:
    def __init__(self, rid: str, tokens: List[int]) -> None:
        self.rid = rid
        self.tokens = tokens
        self.node: Optional[TreeNode] = None
        self.depth = 0
        self.own_pages: List[int] = []
        self.output: List[int] = []
        self.aborted = False


class PrefixRunner:
    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.running: dict[str, Req] = {}
        self.stats: dict[str, int] = defaultdict(int)

    def start(self, req: Req) -> bool:
        node, depth = self.cache.match_and_lock(req.tokens)  # leak: not unlocked when pages run out
        need = -(-len(req.tokens) // PAGE) - depth
        pages = self.cache.alloc_or_evict(need)  # clean: the request's own pages, see finish() and abort()
        if pages is None:
            self.stats["refused"] += 1
            return False
        req.node, req.depth, req.own_pages = node, depth, pages
        self.running[req.rid] = req
        return True

    def finish(self, req: Req) -> None:
        self.running.pop(req.rid, None)
        self.cache.pool.free(req.own_pages)
        req.own_pages = []
        if req.node is not None:
            self.cache.unlock(req.node)
            req.node = None

    def abort(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is not None:
            req.aborted = True
            self.finish(req)

    def warm(self, prompts: List[List[int]]) -> int:
        warmed = 0
        for tokens in prompts:
            node, depth = self.cache.match_and_lock(tokens)  # leak: prompts that are cached skip the unlock
            need = len(tokens) // PAGE - depth
            if need <= 0:
                node.hits += 1
                continue
            pages = self.cache.alloc_or_evict(need)  # clean: near miss, insert() takes the pages over
            if pages is not None:
                self.cache.insert(tokens, depth, pages)
                warmed += 1
            self.cache.unlock(node)
        return warmed

    def hit_depth(self, tokens: List[int]) -> int:
        _, depth = self.cache.match_and_lock(tokens)  # leak: the locked node is thrown away
        return depth

    def largest_run(self, limit: int) -> int:
        """The biggest single allocation that can be had."""
        size, held = 1, None
        while size <= limit:
            grown = self.cache.pool.alloc(size)  # leak: each larger allocation replaces the held one
            if grown is None:
                break
            held = grown
            size *= 2
        if held is not None:
            self.cache.pool.free(held)
        return size // 2
