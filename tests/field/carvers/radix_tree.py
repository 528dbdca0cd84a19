"""Prefix cache as a radix tree over token pages. Nodes in use are locked by reference."""
from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Tuple

_ids = itertools.count()


class TreeNode:
    def __init__(self, parent: Optional["TreeNode"], key: Tuple[int, ...]) -> None:
        self.id = next(_ids)
        self.parent = parent
        self.key = key
        self.children: Dict[int, TreeNode] = {}
        self.lock_ref = 0
        self.last_access = 0

    def __lt__(self, other: "TreeNode") -> bool:
        return self.last_access < other.last_access


class RadixCache:
    def __init__(self, page: int = 4) -> None:
        self.page = page
        self.root = TreeNode(None, ())
        self.root.lock_ref = 1
        self.clock = 0

    def inc_lock_ref(self, node: TreeNode) -> None:
        while node is not None and node is not self.root:
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        while node is not None and node is not self.root:
            node.lock_ref -= 1
            node = node.parent

    def match_prefix(self, tokens: List[int]) -> Tuple[int, TreeNode]:
        self.clock += 1
        node, matched = self.root, 0
        while matched < len(tokens):
            child = node.children.get(tokens[matched])
            if child is None or list(child.key) != tokens[matched:matched + len(child.key)]:
                break
            child.last_access = self.clock
            matched += len(child.key)
            node = child
        return matched, node

    def insert(self, tokens: List[int]) -> TreeNode:
        matched, node = self.match_prefix(tokens)
        for start in range(matched, len(tokens), self.page):
            key = tuple(tokens[start:start + self.page])
            child = node.children.get(key[0])
            if child is None:
                child = node.children[key[0]] = TreeNode(node, key)
            node = child
        return node

    def lock_prefix(self, tokens: List[int]) -> Tuple[int, TreeNode]:
        """Longest cached prefix, locked. The caller has to dec_lock_ref the node."""
        matched, node = self.match_prefix(tokens)
        self.inc_lock_ref(node)  # clean: the locked node is handed to the caller
        return matched, node

    def leaves(self) -> Iterator[TreeNode]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node is not self.root:
                yield node

    def evict(self, count: int) -> int:
        heap = [n for n in self.leaves() if n.lock_ref == 0]
        heapq.heapify(heap)
        dropped = 0
        while heap and dropped < count:
            node = heapq.heappop(heap)
            del node.parent.children[node.key[0]]
            dropped += 1
            if not node.parent.children and node.parent is not self.root and node.parent.lock_ref == 0:
                heapq.heappush(heap, node.parent)
        return dropped


@dataclass
class Req:
    rid: int
    tokens: List[int]
    last_node: Optional[TreeNode] = None
    prefix_len: int = 0
    output: List[int] = field(default_factory=list)


class PrefillAdder:
    def __init__(self, cache: RadixCache, budget: int) -> None:
        self.cache = cache
        self.budget = budget
        self.accepted: List[Req] = []

    def add_one(self, req: Req) -> bool:
        matched, node = self.cache.match_prefix(req.tokens)
        self.cache.inc_lock_ref(node)  # leak: the refusal for lack of budget keeps the lock
        need = len(req.tokens) - matched
        if need > self.budget:
            return False
        self.budget -= need
        req.last_node, req.prefix_len = node, matched
        self.accepted.append(req)
        return True

    def add_chunked(self, req: Req, chunk: int) -> bool:
        matched, node = self.cache.match_prefix(req.tokens)
        self.cache.inc_lock_ref(node)  # clean: near miss, lowered on refusal, else the request keeps it
        need = min(len(req.tokens) - matched, chunk)
        if need > self.budget:
            self.cache.dec_lock_ref(node)
            return False
        self.budget -= need
        req.last_node, req.prefix_len = node, matched
        self.accepted.append(req)
        return True

    def add_locked(self, req: Req) -> bool:
        matched, node = self.cache.lock_prefix(req.tokens)  # clean: lowered on refusal, else kept in the request
        if len(req.tokens) - matched > self.budget:
            self.cache.dec_lock_ref(node)
            return False
        req.last_node = node
        req.prefix_len = matched
        self.accepted.append(req)
        return True


class CacheController:
    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.retracted: List[Req] = []
        self.write_through: Dict[int, TreeNode] = {}

    def finish(self, req: Req) -> None:
        self.cache.insert(req.tokens + req.output)
        if req.last_node is not None:
            self.cache.dec_lock_ref(req.last_node)
            req.last_node = None

    def checkpoint_unfinished(self, req: Req) -> None:
        new_node = self.cache.insert(req.tokens + req.output)
        self.cache.inc_lock_ref(new_node)  # clean: near miss, replaces the request's node whose lock is lowered
        if req.last_node is not None:
            self.cache.dec_lock_ref(req.last_node)
        req.last_node = new_node

    def hit_rate(self, prompts: List[List[int]]) -> float:
        hits = total = 0
        for tokens in prompts:
            matched, _ = self.cache.lock_prefix(tokens)  # leak: the locked node is thrown away
            hits += matched
            total += len(tokens)
        return hits / total if total else 0.0

    def longest(self, prompts: List[List[int]]) -> int:
        best = 0
        for tokens in prompts:
            matched, node = self.cache.lock_prefix(tokens)  # clean: lowered at once
            self.cache.dec_lock_ref(node)
            if matched <= best:
                continue
            best = matched
        return best

    def start_write_through(self, node: TreeNode) -> int:
        if node.id in self.write_through:
            return node.id
        self.cache.inc_lock_ref(node)  # clean: near miss, the table keeps the node until ack
        self.write_through[node.id] = node
        return node.id

    def ack(self, node_id: int) -> None:
        node = self.write_through.pop(node_id)
        self.cache.dec_lock_ref(node)

    def start_backup(self, node: TreeNode, host_pages: int) -> Optional[int]:
        self.cache.inc_lock_ref(node)  # leak: too few host pages return None with the lock held
        if host_pages < len(node.key):
            return None
        self.write_through[node.id] = node
        return node.id

    def pin_system_prompt(self, tokens: List[int]) -> int:
        node = self.cache.insert(tokens)
        self.cache.inc_lock_ref(node)  # leak: nobody keeps the node, so it cannot be unlocked any more
        return len(tokens)

    def evict_around(self, tokens: List[int], count: int) -> int:
        _, node = self.cache.lock_prefix(tokens)  # clean: finally
        try:
            if count <= 0:
                return 0
            return self.cache.evict(count)
        finally:
            self.cache.dec_lock_ref(node)

    def compare(self, left: List[int], right: List[int]) -> bool:
        n_left, node = self.cache.lock_prefix(left)  # leak: node is rebound by the second lookup
        n_right, node = self.cache.lock_prefix(right)  # clean: lowered below
        self.cache.dec_lock_ref(node)
        return n_left == n_right
