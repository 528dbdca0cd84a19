"""Radix-style prefix cache whose nodes are counted by the requests that use them."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple


@dataclass
class Node:
    key: Tuple[int, ...]
    refs: int = 0
    stale: bool = False


class PrefixTree:
    def __init__(self, page: int) -> None:
        self.page = page
        self.nodes: Dict[Tuple[int, ...], Node] = {}

    def insert(self, tokens: List[int]) -> None:
        for end in range(self.page, len(tokens) + 1, self.page):
            key = tuple(tokens[:end])
            self.nodes.setdefault(key, Node(key))

    def match(self, tokens: List[int]) -> Optional[Node]:
        for end in range(len(tokens) // self.page * self.page, 0, -self.page):
            node = self.nodes.get(tuple(tokens[:end]))
            if node is not None:
                return node
        return None

    def inc_ref(self, node: Node) -> None:
        node.refs += 1

    def dec_ref(self, node: Node) -> None:
        node.refs -= 1

    def evict(self) -> int:
        dead = [k for k, n in self.nodes.items() if n.refs == 0]
        for k in dead:
            del self.nodes[k]
        return len(dead)

    def match_and_hold(self, tokens: List[int]) -> Optional[Node]:
        node = self.match(tokens)
        if node is not None:
            self.inc_ref(node)  # clean: the caller holds the returned node
        return node


@dataclass
class Req:
    tokens: List[int]
    node: Optional[Node] = None
    tail: Optional[Node] = None
    children: List["Req"] = field(default_factory=list)
    aborted: bool = False


class PrefillManager:
    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.active: List[Req] = []

    def start(self, req: Req) -> None:
        req.node = self.tree.match_and_hold(req.tokens)  # clean: end drops the count
        self.active.append(req)

    def end(self, req: Req) -> None:
        if req in self.active:
            self.active.remove(req)
        if req.node is not None:
            self.tree.dec_ref(req.node)
            req.node = None
        if req.tail is not None:
            self.tree.dec_ref(req.tail)
            req.tail = None

    def chunk_done(self, req: Req, n: int) -> None:
        self.tree.insert(req.tokens[:n])
        req.tail = self.tree.match_and_hold(req.tokens[:n])  # leak: the next chunk overwrites the tail, its count stays up

    def advance(self, req: Req, n: int) -> None:
        self.tree.insert(req.tokens[:n])
        new = self.tree.match_and_hold(req.tokens[:n])  # clean: near miss, the old node is dropped first
        if req.node is not None:
            self.tree.dec_ref(req.node)
        req.node = new

    def start_fresh(self, req: Req) -> bool:
        node = self.tree.match_and_hold(req.tokens)  # leak: a stale node is refused while still held
        if node is None or node.stale:
            return False
        req.node = node
        self.active.append(req)
        return True

    def hit_len(self, tokens: List[int]) -> int:
        node = self.tree.match_and_hold(tokens)  # leak: only the length is used, the count is never dropped
        return len(node.key) if node is not None else 0

    def split(self, req: Req, n: int) -> None:
        for _ in range(n):
            child = Req(list(req.tokens))
            if req.node is not None:
                self.tree.inc_ref(req.node)  # clean: the child carries the count until end
                child.node = req.node
            req.children.append(child)
            self.active.append(child)

    def ranked(self, reqs: List[Req]) -> List[int]:
        lens = []
        for r in reqs:
            node = self.tree.match_and_hold(r.tokens)  # leak: aborted requests continue before dec_ref
            if node is None:
                continue
            if r.aborted:
                continue
            lens.append(len(node.key))
            self.tree.dec_ref(node)
        return lens

    def with_evict(self, tokens: List[int]) -> int:
        node = self.tree.match_and_hold(tokens)  # clean: near miss, dropped under the same test as taken
        freed = self.tree.evict()
        if node is not None:
            self.tree.dec_ref(node)
        return freed


if __name__ == "__main__":
    t = PrefixTree(2)
    t.insert([1, 2, 3, 4])
    m = PrefillManager(t)
    q = Req([1, 2, 3, 4, 5])
    m.start(q)
    m.advance(q, 2)
    m.end(q)
    assert m.with_evict([9]) == 2
