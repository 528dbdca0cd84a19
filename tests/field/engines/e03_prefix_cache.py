"""Radix-style prefix cache with reference-counted nodes."""
from __future__ import annotations

import heapq
import logging
import time
from dataclasses import dataclass, field
from typing import Iterator, Optional

logger = logging.getLogger(__name__)


@dataclass
class Node:
    key: tuple[int, ...]
    parent: Optional["Node"] = None
    children: dict[int, "Node"] = field(default_factory=dict)
    block_ids: list[int] = field(default_factory=list)
    ref: int = 0
    last_used: float = field(default_factory=time.monotonic)


class PrefixTree:
    """The tree and the counts. A node with ``ref > 0`` is never evicted."""

    def __init__(self) -> None:
        self.root = Node(key=())

    def inc_ref(self, node: Node) -> None:
        while node is not None:
            node.ref += 1  # clean: one count per ancestor, dec_ref walks the same path
            node.last_used = time.monotonic()
            node = node.parent

    def dec_ref(self, node: Node) -> None:
        while node is not None:
            node.ref -= 1
            assert node.ref >= 0
            node = node.parent

    def find(self, tokens: list[int]) -> tuple[Node, int]:
        """Deepest node that matches a prefix, with the matched length."""
        node, matched = self.root, 0
        while matched < len(tokens):
            child = node.children.get(tokens[matched])
            if child is None:
                break
            end = matched + len(child.key)
            if tuple(tokens[matched:end]) != child.key:
                break
            node, matched = child, end
        return node, matched

    def evictable(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.ref == 0 and not node.children and node.parent is not None:
                yield node


class PrefixCache:
    """Matches prompts to cached blocks and keeps the match locked while in use."""

    def __init__(self, min_match: int = 16) -> None:
        self.tree = PrefixTree()
        self.min_match = min_match
        self._locked: dict[str, Node] = {}

    def match(self, req_id: str, tokens: list[int]) -> list[int]:
        node, matched = self.tree.find(tokens)
        self.tree.inc_ref(node)  # leak: a match below the minimum returns with the counts raised
        if matched < self.min_match:
            return []
        self._locked[req_id] = node
        return self._collect(node)

    def extend(self, req_id: str, tokens: list[int], block_ids: list[int]) -> None:
        """Insert the finished part of a request and move its lock to the new node."""
        old = self._locked.pop(req_id, None)
        node, matched = self.tree.find(tokens)
        rest = tokens[matched:]
        if rest:
            child = Node(key=tuple(rest), parent=node, block_ids=block_ids)
            node.children[rest[0]] = child
            node = child
        self.tree.inc_ref(node)  # clean: near miss, the old lock was popped first and is lowered just after
        if old is not None:
            self.tree.dec_ref(old)
        self._locked[req_id] = node

    def finish(self, req_id: str) -> None:
        node = self._locked.pop(req_id, None)
        if node is not None:
            self.tree.dec_ref(node)

    def adopt(self, src_id: str, dst_id: str) -> bool:
        """Let a resumed request hold the same node as another one."""
        node = self._locked.get(src_id)
        if node is None:
            return False
        self.tree.inc_ref(node)  # leak: a node that the resumed id had locked before is overwritten
        self._locked[dst_id] = node
        return True

    def peek(self, tokens: list[int]) -> int:
        """Length of the cached prefix, refreshing its recency."""
        node, matched = self.tree.find(tokens)
        self.tree.inc_ref(node)  # clean: lowered on the next line
        self.tree.dec_ref(node)
        return matched

    @staticmethod
    def _collect(node: Node) -> list[int]:
        chunks: list[list[int]] = []
        while node is not None:
            chunks.append(node.block_ids)
            node = node.parent
        return [b for chunk in reversed(chunks) for b in chunk]

    def evict(self, want: int) -> list[int]:
        """Drop least recently used leaves until ``want`` blocks came free."""
        heap = [(n.last_used, id(n), n) for n in self.tree.evictable()]
        heapq.heapify(heap)
        freed: list[int] = []
        while heap and len(freed) < want:
            _, _, node = heapq.heappop(heap)
            freed.extend(node.block_ids)
            parent = node.parent
            del parent.children[node.key[0]]
        return freed


class SnapshotWriter:
    """Writes hot subtrees to disk without letting eviction at them."""

    def __init__(self, tree: PrefixTree, sink) -> None:
        self.tree = tree
        self.sink = sink

    def write(self, prompts: list[list[int]]) -> int:
        written = 0
        for tokens in prompts:
            node, matched = self.tree.find(tokens)
            if matched == 0:
                continue
            self.tree.inc_ref(node)  # leak: the continue for an already stored key skips the dec_ref
            if self.sink.contains(tuple(tokens[:matched])):
                logger.debug("already stored, %d tokens", matched)
                continue
            self.sink.put(tuple(tokens[:matched]), node.block_ids)
            self.tree.dec_ref(node)
            written += 1
        return written

    def write_one(self, tokens: list[int]) -> bool:
        node, matched = self.tree.find(tokens)
        hit = matched > 0
        if hit:
            self.tree.inc_ref(node)  # clean: near miss, the same flag guards the dec_ref
        key = tuple(tokens[:matched])
        stored = hit and not self.sink.contains(key)
        if stored:
            self.sink.put(key, node.block_ids)
        if hit:
            self.tree.dec_ref(node)
        return stored
