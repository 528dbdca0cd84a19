"""Radix tree over token prefixes; nodes in use are locked against eviction by a count."""
from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Callable, Sequence


class TreeNode:
    def __init__(self, key: tuple[int, ...] = (), parent: "TreeNode | None" = None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[int, TreeNode] = {}
        self.lock_ref = 0
        self.last_access = time.monotonic()

    def __lt__(self, other: "TreeNode") -> bool:
        return self.last_access < other.last_access


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


@dataclass
class Req:
    rid: str
    tokens: list[int]
    last_node: TreeNode | None = None
    host_node: TreeNode | None = None
    prefix_len: int = 0
    output: list[int] = field(default_factory=list)


class RadixCache:
    def __init__(self) -> None:
        self.root = TreeNode()

    def match(self, tokens: Sequence[int]) -> tuple[TreeNode, int]:
        node, pos = self.root, 0
        while pos < len(tokens) and tokens[pos] in node.children:
            child = node.children[tokens[pos]]
            n = _common(child.key, tokens[pos:])
            if n < len(child.key):
                break
            node, pos = child, pos + n
            node.last_access = time.monotonic()
        return node, pos

    def insert(self, tokens: Sequence[int]) -> TreeNode:
        node, pos = self.match(tokens)
        if pos < len(tokens):
            child = TreeNode(tuple(tokens[pos:]), node)
            node.children[tokens[pos]] = child
            node = child
        return node

    def inc_lock_ref(self, node: TreeNode) -> TreeNode:
        cur: TreeNode | None = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent
        return node

    def dec_lock_ref(self, node: TreeNode) -> None:
        cur: TreeNode | None = node
        while cur is not None:
            cur.lock_ref -= 1
            cur = cur.parent

    def match_and_lock(self, tokens: Sequence[int]) -> tuple[TreeNode, int]:
        node, n = self.match(tokens)
        self.inc_lock_ref(node)  # clean: the caller gets the locked node
        return node, n

    def evict(self, count: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.lock_ref == 0 and n.parent]
        heapq.heapify(leaves)
        evicted = 0
        while leaves and evicted < count:
            node = heapq.heappop(leaves)
            del node.parent.children[node.key[0]]
            evicted += len(node.key)
        return evicted

    def _walk(self, node: TreeNode):
        yield node
        for child in node.children.values():
            yield from self._walk(child)


class PrefixScheduler:
    def __init__(self, cache: RadixCache, capacity: int) -> None:
        self.cache = cache
        self.capacity = capacity
        self.running: list[Req] = []
        self.hints: dict[str, TreeNode] = {}

    def admit(self, req: Req) -> bool:
        node, n = self.cache.match_and_lock(req.tokens)  # clean: near miss, unlocked on refusal, else kept in the request
        need = len(req.tokens) - n
        if need > self.capacity and self.cache.evict(need) < need:
            self.cache.dec_lock_ref(node)
            return False
        req.last_node, req.prefix_len = node, n
        self.running.append(req)
        return True

    def finish(self, req: Req, is_insert: bool = True) -> None:
        self.running.remove(req)
        if is_insert:
            self.cache.insert(req.tokens + req.output)
        if req.last_node is not None:
            self.cache.dec_lock_ref(req.last_node)
            req.last_node = None

    def cache_unfinished(self, req: Req) -> None:
        """After a chunk: lock the longer prefix instead of the shorter one."""
        node = self.cache.insert(req.tokens + req.output)
        self.cache.inc_lock_ref(node)  # clean: near miss, stored after the former node was unlocked
        if req.last_node is not None:
            self.cache.dec_lock_ref(req.last_node)
        req.last_node = node

    def attach_host(self, req: Req) -> None:
        node, n = self.cache.match(req.tokens)
        if n > req.prefix_len:
            req.host_node = self.cache.inc_lock_ref(node)  # leak: detach_host clears the field without the dec when nothing was decoded

    def detach_host(self, req: Req) -> None:
        node, req.host_node = req.host_node, None
        if node is not None and req.output:
            self.cache.dec_lock_ref(node)

    def estimate(self, reqs: list[Req]) -> list[int]:
        lengths = []
        for req in reqs:
            node, n = self.cache.match_and_lock(req.tokens)  # leak: a fully cached request continues before the dec
            if n == len(req.tokens):
                lengths.append(0)
                continue
            lengths.append(len(req.tokens) - n)
            self.cache.dec_lock_ref(node)
        return lengths

    def sort_by_prefix(self, reqs: list[Req]) -> list[Req]:
        locked = [(req, *self.cache.match_and_lock(req.tokens)) for req in reqs]  # clean: near miss, each is unlocked in the loop below
        order = sorted(locked, key=lambda item: -item[2])
        for _, node, _ in order:
            self.cache.dec_lock_ref(node)
        return [req for req, _, _ in order]

    def hint(self, session: str, tokens: list[int]) -> None:
        node, n = self.cache.match_and_lock(tokens)  # leak: a session that has a hint gets it replaced without an unlock
        if n == 0:
            self.cache.dec_lock_ref(node)
            return
        self.hints[session] = node

    def forget_hint(self, session: str) -> None:
        node = self.hints.pop(session, None)
        if node is not None:
            self.cache.dec_lock_ref(node)

    def longest(self, variants: list[list[int]]) -> int:
        best: TreeNode | None = None
        best_n = -1
        for tokens in variants:
            node, n = self.cache.match_and_lock(tokens)  # leak: a variant that is no better than the best stays locked
            if n > best_n:
                if best is not None:
                    self.cache.dec_lock_ref(best)
                best, best_n = node, n
        if best is not None:
            self.cache.dec_lock_ref(best)
        return best_n

    def shortest(self, variants: list[list[int]]) -> int:
        held: TreeNode | None = None
        held_n = 1 << 30
        for tokens in variants:
            node, n = self.cache.match_and_lock(tokens)  # clean: near miss, the loser of each comparison is unlocked
            loser = node
            if n < held_n:
                loser, held = held, node
                held_n = n
            if loser is not None:
                self.cache.dec_lock_ref(loser)
        if held is not None:
            self.cache.dec_lock_ref(held)
        return held_n

    def with_locked(self, tokens: list[int], fn: Callable[[TreeNode, int], bool]) -> bool:
        node, n = self.cache.match_and_lock(tokens)  # clean: unlocked in the finally
        try:
            return n > 0 and fn(node, n)
        finally:
            self.cache.dec_lock_ref(node)
