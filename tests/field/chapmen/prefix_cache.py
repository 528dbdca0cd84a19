"""Radix-tree prefix cache with pinned paths."""
from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Sequence, Tuple


class Node:
    __slots__ = ("tokens", "pages", "children", "parent", "pins", "last_used")

    def __init__(self, tokens: Tuple[int, ...], pages: List[int], parent: Optional["Node"]) -> None:
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: Dict[int, Node] = {}
        self.pins = 0
        self.last_used = time.monotonic()


class RadixCache:
    def __init__(self) -> None:
        self.root = Node((), [], None)
        self.hits = 0
        self.lookups = 0

    def lock_path(self, node: Node) -> Node:
        """Pin the node and its ancestors against eviction."""
        cur: Optional[Node] = node
        while cur is not None:
            cur.pins += 1
            cur = cur.parent
        return node

    def unlock_path(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.pins -= 1
            cur = cur.parent

    def walk(self, tokens: Sequence[int]) -> Tuple[Node, int]:
        node, matched = self.root, 0
        while matched < len(tokens):
            child = node.children.get(tokens[matched])
            if child is None:
                break
            span = len(child.tokens)
            if tuple(tokens[matched:matched + span]) != child.tokens:
                break
            node, matched = child, matched + span
            node.last_used = time.monotonic()
        return node, matched

    def match_and_lock(self, tokens: Sequence[int]) -> Optional[Node]:
        self.lookups += 1
        node, matched = self.walk(tokens)
        if matched == 0:
            return None
        self.hits += 1
        return self.lock_path(node)  # clean: handed on to the caller

    def insert(self, tokens: Sequence[int], pages: List[int]) -> Node:
        node, matched = self.walk(tokens)
        rest = tuple(tokens[matched:])
        if not rest:
            return node
        child = Node(rest, pages[matched:], node)
        node.children[rest[0]] = child
        return child

    @contextmanager
    def pinned(self, tokens: Sequence[int]) -> Iterator[Optional[Node]]:
        node = self.match_and_lock(tokens)  # clean: near miss, unlocked in finally when there is one
        try:
            yield node
        finally:
            if node is not None:
                self.unlock_path(node)

    def evict(self, want: int) -> List[int]:
        freed: List[int] = []
        leaves = [n for n in self._iter(self.root) if not n.children and n.pins == 0 and n.parent]
        for leaf in sorted(leaves, key=lambda n: n.last_used):
            if len(freed) >= want:
                break
            freed.extend(leaf.pages)
            leaf.parent.children.pop(leaf.tokens[0], None)
        return freed

    def _iter(self, node: Node) -> Iterator[Node]:
        yield node
        for child in node.children.values():
            yield from self._iter(child)


class CachedRequest:
    def __init__(self, rid: str, tokens: List[int]) -> None:
        self.rid = rid
        self.tokens = tokens
        self.output: List[int] = []
        self.node: Optional[Node] = None
        self.finished = False


class PrefixScheduler:
    """Attaches requests to cache paths and moves them along as they grow."""

    def __init__(self, cache: RadixCache, min_match: int = 16) -> None:
        self.cache = cache
        self.min_match = min_match
        self.active: Dict[str, CachedRequest] = {}

    def attach(self, req: CachedRequest) -> int:
        if req.rid in self.active:
            return 0
        req.node = self.cache.match_and_lock(req.tokens)  # clean: kept in the request, detach() unlocks
        self.active[req.rid] = req
        return 0 if req.node is None else len(req.node.pages)

    def advance(self, req: CachedRequest, pages: List[int]) -> None:
        """Re-pin the request to the longer path after a prefill chunk."""
        longer = self.cache.insert(req.tokens + req.output, pages)
        self.cache.lock_path(longer)  # clean: near miss, the old pin goes and this one is the request's
        if req.node is not None:
            self.cache.unlock_path(req.node)
        req.node = longer

    def detach(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None or req.node is None:
            return
        self.cache.unlock_path(req.node)
        req.node = None

    def estimate_hit(self, tokens: List[int]) -> int:
        node = self.cache.match_and_lock(tokens)  # leak: short matches return 0 while pinned
        if node is None:
            return 0
        depth = 0
        cur: Optional[Node] = node
        while cur is not None:
            depth += len(cur.tokens)
            cur = cur.parent
        if depth < self.min_match:
            return 0
        self.cache.unlock_path(node)
        return depth

    def rank(self, waiting: List[CachedRequest]) -> List[CachedRequest]:
        scored: List[Tuple[int, CachedRequest]] = []
        for req in waiting:
            with self.cache.pinned(req.tokens) as node:  # clean: the context manager unlocks
                score = 0 if node is None else len(node.pages)
            scored.append((score, req))
        scored.sort(key=lambda pair: -pair[0])
        return [req for _, req in scored]

    def warm(self, prompts: List[List[int]], pages: List[List[int]]) -> int:
        """Insert system prompts; pinned while all of them go in."""
        held: List[Node] = []
        for prompt, page_ids in zip(prompts, pages):
            node = self.cache.insert(prompt, page_ids)
            held.append(self.cache.lock_path(node))  # clean: every held node is unlocked below
        count = len(held)
        while held:
            self.cache.unlock_path(held.pop())
        return count

    def shared_depth(self, a: List[int], b: List[int]) -> int:
        """Pages two prompts have in common."""
        left = self.cache.match_and_lock(a)  # leak: stays pinned when the second prompt has no match
        right = self.cache.match_and_lock(b)  # leak: stays pinned when the first prompt has no match
        if left is None or right is None:
            return 0
        seen = set(left.pages)
        common = sum(1 for page in right.pages if page in seen)
        self.cache.unlock_path(right)
        self.cache.unlock_path(left)
        return common

    def pages_of(self, tokens: List[int]) -> List[int]:
        node = self.cache.match_and_lock(tokens)  # clean: near miss, unlocked before both uses of the copy
        pages = [] if node is None else list(node.pages)
        if node is not None:
            self.cache.unlock_path(node)
        if len(pages) < self.min_match:
            return []
        return pages


class SessionPins:
    """Keeps the paths of chat sessions in the cache between turns."""

    def __init__(self, cache: RadixCache, ttl: float) -> None:
        self.cache = cache
        self.ttl = ttl
        self._pins: Dict[str, Tuple[Node, float]] = {}

    def touch(self, session: str, tokens: List[int]) -> bool:
        node = self.cache.match_and_lock(tokens)  # leak: overwrites the session's earlier pin
        if node is None:
            return False
        self._pins[session] = (node, time.monotonic() + self.ttl)
        return True

    def expire(self) -> int:
        now = time.monotonic()
        stale = [s for s, (_, deadline) in self._pins.items() if deadline < now]
        for session in stale:
            node, _ = self._pins.pop(session)
            self.cache.unlock_path(node)
        return len(stale)

    def close(self) -> None:
        for node, _ in self._pins.values():
            self.cache.unlock_path(node)
        self._pins.clear()
