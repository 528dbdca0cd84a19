"""Radix prefix cache: nodes are locked (counted) while a request reads them."""
from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Optional


@dataclass
class TreeNode:
    key: tuple[int, ...] = ()
    parent: Optional["TreeNode"] = None
    children: dict[int, "TreeNode"] = field(default_factory=dict)
    kv_rows: list[int] = field(default_factory=list)
    lock_ref: int = 0
    stamp: float = 0.0

    def __lt__(self, other: "TreeNode") -> bool:
        return self.stamp < other.stamp


@dataclass
class PrefillRequest:
    rid: str
    tokens: tuple[int, ...]
    node: Optional[TreeNode] = None
    matched: int = 0
    cancelled: bool = False


class PrefixTree:
    def __init__(self) -> None:
        self.root = TreeNode()

    def match(self, tokens: tuple[int, ...]) -> TreeNode:
        node, pos = self.root, 0
        while pos < len(tokens) and tokens[pos] in node.children:
            child = node.children[tokens[pos]]
            if tokens[pos:pos + len(child.key)] != child.key:
                break
            node, pos = child, pos + len(child.key)
        node.stamp = time.monotonic()
        return node

    def hold(self, node: TreeNode) -> TreeNode:
        cur: Optional[TreeNode] = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent
        return node

    def match_and_hold(self, tokens: tuple[int, ...]) -> Optional[TreeNode]:
        node = self.hold(self.match(tokens))  # clean: near miss, a root match is let go and None returned
        if node is self.root:
            self.let_go(node)
            return None
        return node

    def let_go(self, node: TreeNode) -> None:
        cur: Optional[TreeNode] = node
        while cur is not None:
            cur.lock_ref -= 1
            cur = cur.parent

    def insert(self, tokens: tuple[int, ...], rows: list[int]) -> TreeNode:
        base = self.match(tokens)
        depth = 0
        cur: Optional[TreeNode] = base
        while cur is not None:
            depth += len(cur.key)
            cur = cur.parent
        if depth == len(tokens):
            return base
        leaf = TreeNode(tokens[depth:], base, kv_rows=rows[depth:])
        base.children[tokens[depth]] = leaf
        return leaf

    def evict(self, count: int) -> list[int]:
        leaves = [n for n in self._walk(self.root) if not n.children and n.lock_ref == 0 and n.parent]
        heapq.heapify(leaves)
        rows: list[int] = []
        while leaves and len(rows) < count:
            n = heapq.heappop(leaves)
            assert n.parent is not None
            n.parent.children.pop(n.key[0])
            rows += n.kv_rows
        return rows

    def _walk(self, node: TreeNode):
        yield node
        for c in node.children.values():
            yield from self._walk(c)


class PrefillQueue:
    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.ready: list[PrefillRequest] = []

    def add(self, req: PrefillRequest) -> None:
        node = self.tree.match_and_hold(req.tokens)  # clean: kept in the request, done() lets go
        if node is not None:
            req.node = node
            req.matched = sum(1 for _ in node.kv_rows)
        self.ready.append(req)

    def add_all(self, reqs: list[PrefillRequest]) -> int:
        n = 0
        for req in reqs:
            node = self.tree.match_and_hold(req.tokens)  # leak: a cancelled request is skipped with its node held
            if req.cancelled:
                continue
            req.node = node
            self.ready.append(req)
            n += 1
        return n

    def refresh(self, req: PrefillRequest) -> int:
        """A longer prefix may have been cached in the meantime."""
        node = self.tree.match_and_hold(req.tokens)  # leak: the request's former node is replaced while held
        if node is None:
            return 0
        req.node = node
        return len(node.kv_rows)

    def upgrade(self, req: PrefillRequest) -> int:
        node = self.tree.match_and_hold(req.tokens)  # clean: near miss, the former node is let go before the swap
        if node is None:
            return 0
        if req.node is not None:
            self.tree.let_go(req.node)
        req.node = node
        return len(node.kv_rows)

    def commit(self, req: PrefillRequest, rows: list[int]) -> None:
        leaf = self.tree.hold(self.tree.insert(req.tokens, rows))  # clean: near miss, replaces the node let go on the next lines
        if req.node is not None:
            self.tree.let_go(req.node)
        req.node = leaf

    def done(self, req: PrefillRequest) -> None:
        if req in self.ready:
            self.ready.remove(req)
        if req.node is not None:
            self.tree.let_go(req.node)
            req.node = None


def hit_length(tree: PrefixTree, tokens: tuple[int, ...]) -> int:
    node = tree.match_and_hold(tokens)  # leak: a leaf without rows returns zero while held
    if node is None:
        return 0
    if not node.kv_rows:
        return 0
    n = len(node.kv_rows)
    tree.let_go(node)
    return n


def is_cached(tree: PrefixTree, tokens: tuple[int, ...]) -> bool:
    return tree.match_and_hold(tokens) is not None  # leak: held only to be compared with None


def copy_rows(tree: PrefixTree, tokens: tuple[int, ...]) -> list[int]:
    node = tree.hold(tree.match(tokens))  # clean: near miss, let go after the rows were copied on either branch
    if node.parent is None:
        rows: list[int] = []
    else:
        rows = list(node.kv_rows)
    tree.let_go(node)
    return rows


def schedule_longest(queue: PrefillQueue, reqs: list[PrefillRequest]) -> Optional[PrefillRequest]:
    best: Optional[PrefillRequest] = None
    for req in reqs:
        if req.node is None:
            req.node = queue.tree.match_and_hold(req.tokens)  # clean: near miss, every request keeps its own node until done
        if req.node is not None and (best is None or len(req.node.kv_rows) > len(best.node.kv_rows)):
            best = req
    return best
