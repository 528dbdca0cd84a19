"""Radix tree over token sequences; nodes are locked by reference count while requests use them."""
from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple


class TreeNode:
    __slots__ = ("key", "slots", "children", "parent", "lock_ref", "last_access")

    def __init__(self, key: Tuple[int, ...], slots: List[int], parent: Optional["TreeNode"]) -> None:
        self.key = key
        self.slots = slots
        self.children: Dict[int, TreeNode] = {}
        self.parent = parent
        self.lock_ref = 0
        self.last_access = time.monotonic()

    def __lt__(self, other: "TreeNode") -> bool:
        return self.last_access < other.last_access


class TokenSlots:

    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out = self._free[:n]
        del self._free[:n]
        return out

    def free(self, slots: List[int]) -> None:
        self._free.extend(slots)


@dataclass
class Req:
    rid: str
    tokens: List[int]
    prefix_len: int = 0
    node: Optional[TreeNode] = None
    slots: List[int] = field(default_factory=list)


class RadixCache:

    def __init__(self, token_slots: TokenSlots) -> None:
        self.token_slots = token_slots
        self.root = TreeNode((), [], None)
        self.root.lock_ref = 1

    def inc_lock_ref(self, node: TreeNode) -> None:
        while node is not self.root:
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        while node is not self.root:
            node.lock_ref -= 1
            node = node.parent

    def match_prefix(self, tokens: List[int]) -> Tuple[TreeNode, int]:
        node, n = self.root, 0
        while n < len(tokens):
            child = node.children.get(tokens[n])
            if child is None or tuple(tokens[n:n + len(child.key)]) != child.key:
                break
            child.last_access = time.monotonic()
            node, n = child, n + len(child.key)
        return node, n

    def match_and_lock(self, tokens: List[int]) -> Tuple[TreeNode, int]:
        node, n = self.match_prefix(tokens)
        self.inc_lock_ref(node)  # clean: the locked node goes to the caller
        return node, n

    def insert(self, tokens: List[int], slots: List[int], owned_from: int) -> TreeNode:
        """Takes over slots[owned_from:]; what the tree has already is freed."""
        node, n = self.match_prefix(tokens)
        self.token_slots.free(slots[owned_from:n])
        if n == len(tokens):
            return node
        leaf = TreeNode(tuple(tokens[n:]), slots[n:], node)
        old = node.children.get(tokens[n])
        if old is not None:
            self.token_slots.free(leaf.slots)
            return node
        node.children[tokens[n]] = leaf
        return leaf

    def evict(self, n: int) -> int:
        leaves = [x for x in self._leaves() if x.lock_ref == 0 and x is not self.root]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < n:
            leaf = heapq.heappop(leaves)
            self.token_slots.free(leaf.slots)
            freed += len(leaf.slots)
            del leaf.parent.children[leaf.key[0]]
            if not leaf.parent.children and leaf.parent.lock_ref == 0:
                heapq.heappush(leaves, leaf.parent)
        return freed

    def _leaves(self) -> List[TreeNode]:
        out, stack = [], [self.root]
        while stack:
            x = stack.pop()
            stack.extend(x.children.values())
            if not x.children:
                out.append(x)
        return out


class PrefillAdder:

    def __init__(self, cache: RadixCache, max_prefill: int) -> None:
        self.cache = cache
        self.max_prefill = max_prefill
        self.running: List[Req] = []

    def add_one(self, req: Req) -> bool:
        node, n = self.cache.match_prefix(req.tokens)
        self.cache.inc_lock_ref(node)  # leak: over the prefill budget the node stays locked
        extend = len(req.tokens) - n
        if extend > self.max_prefill:
            return False
        slots = self._alloc_or_evict(extend)  # clean: stored in the request, release() frees it
        if slots is None:
            self.cache.dec_lock_ref(node)
            return False
        req.node, req.prefix_len, req.slots = node, n, slots
        self.running.append(req)
        return True

    def add_chunked(self, req: Req) -> bool:
        node, n = self.cache.match_and_lock(req.tokens)  # clean: near miss, unlocked on both ways out or kept in the request
        extend = min(len(req.tokens) - n, self.max_prefill)
        slots = self._alloc_or_evict(extend) if extend else []  # clean: stored in the request
        if slots is None:
            self.cache.dec_lock_ref(node)
            return False
        req.node, req.prefix_len, req.slots = node, n, slots
        self.running.append(req)
        return True

    def _alloc_or_evict(self, n: int) -> Optional[List[int]]:
        slots = self.cache.token_slots.alloc(n)  # clean: None-checked and returned
        if slots is None:
            self.cache.evict(n - self.cache.token_slots.available())
            slots = self.cache.token_slots.alloc(n)  # clean: near miss, the first attempt gave None
        return slots

    def estimate_hit(self, tokens: List[int]) -> float:
        node, n = self.cache.match_and_lock(tokens)  # leak: only the length is used, the lock stays
        return n / max(len(tokens), 1)

    def peek_hit(self, tokens: List[int]) -> int:
        node, n = self.cache.match_and_lock(tokens)  # clean: near miss, unlocked before the return
        self.cache.dec_lock_ref(node)
        return n

    def next_chunk(self, req: Req) -> bool:
        """Hand the computed chunk to the tree and move the lock down."""
        self._insert_done(req)
        new_node, n = self.cache.match_prefix(req.tokens)
        self.cache.inc_lock_ref(new_node)  # clean: near miss, the request's lock is moved
        if req.node is not None:
            self.cache.dec_lock_ref(req.node)
        req.node, req.prefix_len = new_node, n
        return n < len(req.tokens)

    def finish(self, req: Req) -> None:
        self._insert_done(req)
        self.cache.dec_lock_ref(req.node)
        req.node = None
        self.running.remove(req)

    def _insert_done(self, req: Req) -> None:
        done = req.prefix_len + len(req.slots)
        path = self._path_slots(req.node) + req.slots
        self.cache.insert(req.tokens[:done], path, req.prefix_len)
        req.slots = []

    def retract(self, req: Req) -> None:
        self.cache.token_slots.free(req.slots)
        self.cache.dec_lock_ref(req.node)
        req.node, req.slots = None, []
        self.running.remove(req)

    def pin_system_prompt(self, prompts: List[List[int]]) -> int:
        total = 0
        for tokens in prompts:
            node, n = self.cache.match_and_lock(tokens)  # leak: a partial match goes on with continue, still locked
            if n < len(tokens):
                continue
            total += n
            self.cache.dec_lock_ref(node)
        return total

    def dummy_extend(self, n: int) -> int:
        slots = self._alloc_or_evict(n)  # leak: bound locally and never freed when larger than the budget
        if slots is None:
            return 0
        if n > self.max_prefill:
            return self.max_prefill
        self.cache.token_slots.free(slots)
        return n

    def _path_slots(self, node: TreeNode) -> List[int]:
        out: List[int] = []
        while node is not self.cache.root:
            out = node.slots + out
            node = node.parent
        return out
