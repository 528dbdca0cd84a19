"""Radix-tree prefix cache: lock references keep the matched path from eviction."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple


@dataclass(eq=False)
class RadixNode:
    token: int
    parent: Optional["RadixNode"] = None
    children: Dict[int, "RadixNode"] = field(default_factory=dict)
    lock_ref: int = 0


class RadixCache:
    def __init__(self) -> None:
        self.root = RadixNode(-1)

    def insert(self, tokens: List[int]) -> RadixNode:
        node = self.root
        for t in tokens:
            if t not in node.children:
                node.children[t] = RadixNode(t, node)
            node = node.children[t]
        return node

    def match(self, tokens: List[int]) -> RadixNode:
        node = self.root
        for t in tokens:
            if t not in node.children:
                break
            node = node.children[t]
        return node

    def inc_lock_ref(self, node: RadixNode) -> None:
        cur: Optional[RadixNode] = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent

    def dec_lock_ref(self, node: RadixNode) -> None:
        cur: Optional[RadixNode] = node
        while cur is not None:
            cur.lock_ref -= 1
            cur = cur.parent


@dataclass
class Req:
    tokens: List[int]
    last_node: Optional[RadixNode] = None
    chunked: bool = False
    out: List[int] = field(default_factory=list)


class PrefixScheduler:
    def __init__(self, cache: RadixCache, budget: int) -> None:
        self.cache = cache
        self.budget = budget
        self.running: List[Req] = []

    def admit(self, req: Req) -> bool:
        if req.last_node is not None:
            return True
        node = self.cache.match(req.tokens)
        self.cache.inc_lock_ref(node)  # clean: near miss, undone on refusal, else finish undoes it through last_node
        if len(req.tokens) > self.budget:
            self.cache.dec_lock_ref(node)
            return False
        self.budget -= len(req.tokens)
        req.last_node = node
        self.running.append(req)
        return True

    def extend(self, req: Req, token: int) -> None:
        """After a decode step the request's path grows by one node."""
        req.out.append(token)
        node = self.cache.insert(req.tokens + req.out)
        self.cache.inc_lock_ref(node)  # clean: near miss, the older path is unlocked before last_node moves
        self.cache.dec_lock_ref(req.last_node)
        req.last_node = node

    def checkpoint(self, req: Req) -> None:
        node = self.cache.insert(req.tokens + req.out)
        self.cache.inc_lock_ref(node)  # leak: for chunked requests last_node stays behind and nothing undoes it
        if not req.chunked:
            self.cache.dec_lock_ref(req.last_node)
            req.last_node = node

    def finish(self, req: Req) -> None:
        self.running.remove(req)
        self.budget += len(req.tokens)
        self.cache.dec_lock_ref(req.last_node)
        req.last_node = None

    def score(self, tokens: List[int], fn: Callable[[RadixNode], float]) -> float:
        node = self.cache.match(tokens)
        self.cache.inc_lock_ref(node)  # clean: undone in the finally
        try:
            return fn(node)
        finally:
            self.cache.dec_lock_ref(node)

    def peek(self, tokens: List[int]) -> Tuple[int, bool]:
        node = self.cache.match(tokens)
        self.cache.inc_lock_ref(node)  # leak: undone on the parent path only, not on the node that was locked
        depth = 0
        while node.parent is not None:
            depth += 1
            node = node.parent
        self.cache.dec_lock_ref(node)
        return depth, depth == len(tokens)


def main() -> None:
    cache = RadixCache()
    cache.insert([1, 2, 3])
    sch = PrefixScheduler(cache, 10)
    r = Req([1, 2, 4])
    print(sch.admit(r), sch.admit(Req([1] * 20)))
    sch.extend(r, 5)
    sch.checkpoint(r)
    sch.score([1, 2], lambda n: float(n.token))
    sch.finish(r)
    node = cache.match([1, 2])
    print(cache.root.lock_ref, node.lock_ref)
    sch.peek([1, 2])
    print(cache.root.lock_ref, node.lock_ref)


if __name__ == "__main__":
    main()
