"""Radix tree with lock references: a locked node and its ancestors cannot be evicted."""
from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Iterator, Optional


@dataclass
class Node:
    key: tuple[int, ...] = ()
    value: list[int] = field(default_factory=list)
    parent: Optional["Node"] = None
    children: dict[int, "Node"] = field(default_factory=dict)
    lock_ref: int = 0
    last_access: int = 0

    def is_leaf(self) -> bool:
        return not self.children


def common_len(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


class RadixTree:
    def __init__(self) -> None:
        self.root = Node(lock_ref=1)
        self._clock = itertools.count(1)
        self._seq = itertools.count()

    # ---- locks -----------------------------------------------------------

    def inc_lock_ref(self, node: Node) -> Node:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent
        return node

    def dec_lock_ref(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock_ref -= 1
            cur = cur.parent

    # ---- lookup ----------------------------------------------------------

    def walk(self, ids: tuple[int, ...]) -> tuple[Node, list[int]]:
        node, hit = self.root, []
        while ids and ids[0] in node.children:
            child = node.children[ids[0]]
            n = common_len(child.key, ids)
            if n < len(child.key):
                break
            hit.extend(child.value)
            ids = ids[n:]
            node = child
            node.last_access = next(self._clock)
        return node, hit

    def match(self, ids: tuple[int, ...]) -> tuple[Node, list[int]]:
        """The deepest matching node, locked for the caller, and its slots."""
        node, hit = self.walk(ids)
        self.inc_lock_ref(node)  # clean: the locked node is handed to the caller
        return node, hit

    def longest(self, candidates: list[tuple[int, ...]]) -> Optional[Node]:
        """The locked node of the candidate with the longest match."""
        best: Optional[Node] = None
        best_len = -1
        for ids in candidates:
            node, hit = self.match(ids)  # clean: near miss, loser is unlocked and the winner returned
            if len(hit) <= best_len:
                self.dec_lock_ref(node)
                continue
            if best is not None:
                self.dec_lock_ref(best)
            best, best_len = node, len(hit)
        return best

    def is_cached(self, ids: tuple[int, ...]) -> bool:
        node, hit = self.match(ids)  # leak: a full hit returns with the node locked
        if len(hit) == len(ids):
            return True
        self.dec_lock_ref(node)
        return False

    # ---- update ----------------------------------------------------------

    def insert(self, ids: tuple[int, ...], slots: list[int]) -> int:
        """Put slots under ids; returns how many of the leading slots the tree did not take over."""
        node, hit = self.walk(ids)
        n = len(hit)
        if n < len(ids) and ids[n] not in node.children:
            child = Node(ids[n:], slots[n:], node, last_access=next(self._clock))
            node.children[ids[n]] = child
            return n
        return len(ids)

    def leaves(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.is_leaf() and node is not self.root:
                yield node
            stack.extend(node.children.values())

    def evict(self, n: int) -> list[list[int]]:
        heap = [(x.last_access, next(self._seq), x) for x in self.leaves() if x.lock_ref == 0]
        heapq.heapify(heap)
        out, got = [], 0
        while heap and got < n:
            _, _, node = heapq.heappop(heap)
            out.append(node.value)
            got += len(node.value)
            parent = node.parent
            del parent.children[node.key[0]]
            if parent.is_leaf() and parent.lock_ref == 0:
                heapq.heappush(heap, (parent.last_access, next(self._seq), parent))
        return out
