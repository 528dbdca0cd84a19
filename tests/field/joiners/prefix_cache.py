"""Prefix cache: a radix tree of counted nodes shared by requests."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Sequence, Tuple


@dataclass(eq=False)
class PrefixNode:
    tokens: Tuple[int, ...]
    parent: Optional["PrefixNode"] = None
    children: Dict[int, "PrefixNode"] = field(default_factory=dict)
    users: int = 0
    stamp: int = 0


class PrefixTree:
    """A node can be evicted only when nobody retains it."""

    def __init__(self):
        self.root = PrefixNode(())
        self.clock = 0

    def retain(self, node: PrefixNode) -> PrefixNode:
        self.clock += 1
        node.users += 1
        node.stamp = self.clock
        return node

    def drop(self, node: PrefixNode) -> None:
        node.users -= 1

    def match(self, tokens: Sequence[int]) -> Optional[PrefixNode]:
        """The deepest node on the way of tokens, retained; None if there is none."""
        node, i = self.root, 0
        while i < len(tokens):
            child = node.children.get(tokens[i])
            if child is None or tuple(tokens[i:i + len(child.tokens)]) != child.tokens:
                break
            node, i = child, i + len(child.tokens)
        if node is self.root:
            return None
        return self.retain(node)  # clean: returned, the caller drops it

    def insert(self, tokens: Sequence[int], under: Optional[PrefixNode] = None) -> PrefixNode:
        """Retained on return."""
        parent = under or self.root
        node = parent.children.get(tokens[0])
        if node is None:
            node = PrefixNode(tuple(tokens), parent)
            parent.children[tokens[0]] = node
        return self.retain(node)  # clean: returned, the caller drops it

    def evict(self) -> int:
        n = 0
        stack: List[PrefixNode] = list(self.root.children.values())
        while stack:
            node = stack.pop()
            if node.users == 0 and not node.children:
                del node.parent.children[node.tokens[0]]
                n += 1
            else:
                stack.extend(node.children.values())
        return n


@dataclass(eq=False)
class Request:
    rid: str
    tokens: List[int]
    node: Optional[PrefixNode] = None


class PrefixScheduler:
    def __init__(self, tree: PrefixTree, max_tokens: int = 64):
        self.tree = tree
        self.max_tokens = max_tokens
        self.active: Dict[str, Request] = {}

    def start(self, req: Request) -> bool:
        node = self.tree.match(req.tokens)  # clean: None-checked, moved into the request
        if node is None:
            node = self.tree.insert(req.tokens)  # clean: moved into the request, finish drops it
        req.node = node
        self.active[req.rid] = req
        return True

    def start_limited(self, req: Request) -> bool:
        node = self.tree.match(req.tokens)  # leak: too long a request is refused with the node retained
        if len(req.tokens) > self.max_tokens:
            return False
        if node is None:
            node = self.tree.insert(req.tokens)  # clean: moved into the request
        req.node = node
        self.active[req.rid] = req
        return True

    def extend(self, req: Request, tokens: Sequence[int]) -> None:
        child = self.tree.insert(tokens, under=req.node)  # clean: near miss, the node it replaces is dropped
        if req.node is not None:
            self.tree.drop(req.node)
        req.node = child
        req.tokens.extend(tokens)

    def branch(self, req: Request, tails: Sequence[Sequence[int]]) -> Optional[PrefixNode]:
        best = None
        for tail in tails:
            node = self.tree.insert(tail, under=req.node)  # leak: a better one replaces best without drop
            if best is None or len(node.tokens) > len(best.tokens):
                best = node
            else:
                self.tree.drop(node)
        return best

    def branch_first(self, req: Request, tails: Sequence[Sequence[int]]) -> Optional[PrefixNode]:
        for tail in tails:
            node = self.tree.insert(tail, under=req.node)  # clean: near miss, returned on a hit, dropped on the other way
            if len(node.tokens) >= 2:
                return node
            self.tree.drop(node)
        return None

    def pick(self, req: Request, tails: Sequence[Sequence[int]]) -> int:
        node = self.branch_first(req, tails)  # leak: length read from it, never dropped
        return len(node.tokens) if node is not None else 0

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        if req.node is not None:
            self.tree.drop(req.node)
            req.node = None

    def is_cached(self, tokens: Sequence[int]) -> bool:
        return self.tree.match(tokens) is not None  # leak: the count raised by match stays

    def longest(self, rows: Sequence[Sequence[int]]) -> Iterator[PrefixNode]:
        """Each node is valid while the consumer is at it."""
        for row in rows:
            node = self.tree.match(row)  # clean: dropped in finally when the consumer comes back or closes
            if node is None:
                continue
            try:
                yield node
            finally:
                self.tree.drop(node)
