"""Radix-style prefix cache. Nodes are locked while a request reads from them."""
from __future__ import annotations

import logging
from typing import Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)


class TreeNode:
    __slots__ = ("key", "children", "parent", "ref_count", "last_used", "kv_rows")

    def __init__(self, key: Tuple[int, ...], parent: Optional["TreeNode"]) -> None:
        self.key = key
        self.children: Dict[int, TreeNode] = {}
        self.parent = parent
        self.ref_count = 0
        self.last_used = 0
        self.kv_rows: List[int] = []

    def inc_ref(self) -> None:
        self.ref_count += 1

    def dec_ref(self) -> None:
        assert self.ref_count > 0
        self.ref_count -= 1


class PrefixCache:
    def __init__(self, capacity: int) -> None:
        self.root = TreeNode((), None)
        self.capacity = capacity
        self.clock = 0
        self.size = 0

    def match(self, tokens: List[int]) -> TreeNode:
        node, i = self.root, 0
        while i < len(tokens):
            child = node.children.get(tokens[i])
            if child is None or tuple(tokens[i : i + len(child.key)]) != child.key:
                break
            i += len(child.key)
            node = child
        self.clock += 1
        node.last_used = self.clock
        return node

    def lock_node(self, node: TreeNode) -> None:
        while node is not None:
            node.inc_ref()  # clean: the whole path is counted down in unlock_node
            node = node.parent

    def unlock_node(self, node: TreeNode) -> None:
        while node is not None:
            node.dec_ref()
            node = node.parent

    def insert(self, tokens: List[int], rows: List[int]) -> TreeNode:
        parent = self.match(tokens)
        self.lock_node(parent)  # leak: stays locked when the prompt is in the tree already
        depth, cur = 0, parent
        while cur is not None:
            depth += len(cur.key)
            cur = cur.parent
        rest = tuple(tokens[depth:])
        if not rest:
            return parent
        if self.size + len(rest) > self.capacity:
            self.evict(len(rest))
        child = TreeNode(rest, parent)
        child.kv_rows = rows[depth:]
        parent.children[rest[0]] = child
        self.size += len(rest)
        self.unlock_node(parent)
        return child

    def read_rows(self, tokens: List[int]) -> List[int]:
        node = self.match(tokens)
        self.lock_node(node)  # clean: unlocked in the finally
        try:
            rows: List[int] = []
            cur: Optional[TreeNode] = node
            while cur is not None:
                rows[:0] = cur.kv_rows
                cur = cur.parent
            return rows
        finally:
            self.unlock_node(node)

    def evict(self, need: int) -> int:
        freed = 0
        leaves = [n for n in self._leaves() if n.ref_count == 0]
        leaves.sort(key=lambda n: n.last_used)
        for leaf in leaves:
            if freed >= need:
                break
            if leaf.parent is None:
                continue
            del leaf.parent.children[leaf.key[0]]
            freed += len(leaf.key)
        self.size -= freed
        return freed

    def _leaves(self) -> List[TreeNode]:
        stack, out = [self.root], []
        while stack:
            n = stack.pop()
            if n.children:
                stack.extend(n.children.values())
            else:
                out.append(n)
        return out


class PrefixAwareAdmission:
    def __init__(self, cache: PrefixCache, budget: int) -> None:
        self.cache = cache
        self.budget = budget
        self.held: Dict[str, TreeNode] = {}
        self.anchors: Dict[str, TreeNode] = {}

    def admit(self, rid: str, tokens: List[int]) -> bool:
        if rid in self.held:
            return True
        node = self.cache.match(tokens)
        self.cache.lock_node(node)  # clean: near miss, unlocked when over budget, else kept until finish
        if len(tokens) > self.budget:
            self.cache.unlock_node(node)
            return False
        self.budget -= len(tokens)
        self.held[rid] = node
        return True

    def extend(self, rid: str, tokens: List[int]) -> bool:
        new = self.cache.match(tokens)
        old = self.held.get(rid)
        if new is old:
            return False
        self.cache.lock_node(new)  # clean: takes the place of the old node, which is unlocked
        if old is not None:
            self.cache.unlock_node(old)
        self.held[rid] = new
        return True

    def anchor(self, name: str, tokens: List[int]) -> None:
        node = self.cache.match(tokens)
        self.cache.lock_node(node)  # leak: overwrites the locked node that was anchored under the name
        self.anchors[name] = node

    def unanchor(self, name: str) -> None:
        node = self.anchors.pop(name, None)
        if node is not None:
            self.cache.unlock_node(node)

    def peek(self, tokens: List[int], min_rows: int) -> int:
        node = self.cache.match(tokens)
        self.cache.lock_node(node)  # leak: too short a match returns with the lock
        n = len(node.kv_rows)
        if n < min_rows:
            logger.debug("prefix of %d rows ignored", n)
            return 0
        self.cache.unlock_node(node)
        return n

    def hit_rate(self, prompts: List[List[int]]) -> float:
        hits = 0
        for p in prompts:
            node = self.cache.match(p)
            node.inc_ref()  # clean: near miss, counted down before the continue as well
            if node is self.cache.root:
                node.dec_ref()
                continue
            hits += 1
            node.dec_ref()
        return hits / max(1, len(prompts))

    def warm(self, prompts: List[List[int]]) -> int:
        touched = 0
        for p in prompts:
            node = self.cache.match(p)
            node.inc_ref()  # leak: the continue for the root keeps the count
            if node is self.cache.root:
                continue
            touched += 1
            node.dec_ref()
        return touched

    def finish(self, rid: str) -> None:
        node = self.held.pop(rid, None)
        if node is not None:
            self.cache.unlock_node(node)
