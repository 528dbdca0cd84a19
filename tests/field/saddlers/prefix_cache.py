"""Radix-style prefix cache. Nodes are pinned while a request reads their KV and can be evicted at zero pins."""
from __future__ import annotations

import time
from typing import Callable, Dict, List, Optional, Sequence, Tuple


class Node:
    __slots__ = ("key", "parent", "children", "pins", "last_used", "page")

    def __init__(self, key: Tuple[int, ...], parent: Optional["Node"], page: int) -> None:
        self.key = key
        self.parent = parent
        self.children: Dict[Tuple[int, ...], Node] = {}
        self.pins = 0
        self.last_used = time.monotonic()
        self.page = page


class PrefixTree:
    def __init__(self, chunk: int = 4) -> None:
        self.chunk = chunk
        self.root = Node((), None, -1)
        self._next_page = 0

    def pin(self, node: Node) -> Node:
        node.pins += 1
        node.last_used = time.monotonic()
        return node

    def unpin(self, node: Node) -> None:
        assert node.pins > 0, "unbalanced unpin"
        node.pins -= 1

    def find(self, tokens: Sequence[int]) -> Optional[Node]:
        """Deepest cached node on the path of ``tokens``; not pinned."""
        node = self.root
        for i in range(0, len(tokens) - self.chunk + 1, self.chunk):
            child = node.children.get(tuple(tokens[i:i + self.chunk]))
            if child is None:
                break
            node = child
        return None if node is self.root else node

    def insert(self, tokens: Sequence[int]) -> Node:
        node = self.root
        for i in range(0, len(tokens) - self.chunk + 1, self.chunk):
            key = tuple(tokens[i:i + self.chunk])
            if key not in node.children:
                node.children[key] = Node(key, node, self._next_page)
                self._next_page += 1
            node = node.children[key]
        return node

    def lookup_pinned(self, tokens: Sequence[int]) -> Optional[Node]:
        node = self.find(tokens)
        if node is None:
            return None
        return self.pin(node)  # clean: handed to the caller

    def depth(self, node: Node) -> int:
        n = 0
        while node.parent is not None:
            n, node = n + 1, node.parent
        return n

    def evict(self, want: int) -> int:
        gone, stack = 0, [self.root]
        while stack and gone < want:
            node = stack.pop()
            for key, child in list(node.children.items()):
                if not child.children and child.pins == 0 and gone < want:
                    del node.children[key]
                    gone += 1
                else:
                    stack.append(child)
        return gone


class Request:
    def __init__(self, rid: str, tokens: List[int], use_cache: bool = True) -> None:
        self.rid = rid
        self.tokens = tokens
        self.use_cache = use_cache
        self.node: Optional[Node] = None
        self.cancelled = False


class PrefixAwareRunner:
    """Runs prefill with the cached prefix skipped."""

    def __init__(self, tree: PrefixTree, forward: Callable[[List[int]], int], min_depth: int = 1) -> None:
        self.tree = tree
        self.forward = forward
        self.min_depth = min_depth
        self.active: Dict[str, Request] = {}

    def begin(self, req: Request) -> int:
        if req.rid in self.active:
            raise ValueError(f"duplicate request {req.rid}")
        if req.use_cache:
            req.node = self.tree.lookup_pinned(req.tokens)  # clean: near miss, end() unpins under the same flag
        self.active[req.rid] = req
        return self.tree.depth(req.node) * self.tree.chunk if req.node else 0

    def end(self, rid: str) -> None:
        req = self.active.pop(rid)
        if req.use_cache and req.node is not None:
            self.tree.unpin(req.node)
            req.node = None

    def prefill_once(self, req: Request) -> int:
        """One-shot prefill for scoring endpoints."""
        node = self.tree.lookup_pinned(req.tokens)  # leak: a match that is too shallow is forgotten without unpin
        skip = 0
        if node is not None:
            if self.tree.depth(node) < self.min_depth:
                return self.forward(req.tokens)
            skip = self.tree.depth(node) * self.tree.chunk
        out = self.forward(req.tokens[skip:])
        if node is not None:
            self.tree.unpin(node)
        return out

    def score(self, req: Request) -> Optional[int]:
        node = self.tree.lookup_pinned(req.tokens)  # clean: near miss, the finally covers the early return
        try:
            if req.cancelled:
                return None
            skip = self.tree.depth(node) * self.tree.chunk if node is not None else 0
            return self.forward(req.tokens[skip:])
        finally:
            if node is not None:
                self.tree.unpin(node)

    def longest_of(self, variants: List[List[int]]) -> int:
        """Depth of the best cached variant; used for routing."""
        best: Optional[Node] = None
        for tokens in variants:
            node = self.tree.lookup_pinned(tokens)  # leak: a better candidate rebinds best and the former one stays pinned
            if node is None:
                continue
            if best is None or self.tree.depth(node) > self.tree.depth(best):
                best = node
            else:
                self.tree.unpin(node)
        if best is None:
            return 0
        depth = self.tree.depth(best)
        self.tree.unpin(best)
        return depth

    def best_variant(self, variants: List[List[int]]) -> Optional[Node]:
        """Pinned node of the best cached variant."""
        best: Optional[Node] = None
        for tokens in variants:
            node = self.tree.lookup_pinned(tokens)  # clean: the loser of each comparison is unpinned, the winner handed to the caller
            if node is None:
                continue
            if best is not None and self.tree.depth(node) <= self.tree.depth(best):
                self.tree.unpin(node)
                continue
            if best is not None:
                self.tree.unpin(best)
            best = node
        return best

    def affinity(self, variants: List[List[int]]) -> int:
        node = self.best_variant(variants)  # leak: only the depth of the pinned node is returned
        if node is None:
            return 0
        return self.tree.depth(node)

    def publish(self, req: Request, result: int) -> None:
        leaf = self.tree.insert(req.tokens)
        self.tree.pin(leaf)  # leak: returns for a negative result before unpin
        if result < 0:
            req.cancelled = True
            return
        self.tree.evict(want=0)
        self.tree.unpin(leaf)

    def extend(self, req: Request, new_tokens: List[int]) -> None:
        """Moves the request's pin to the node of its longer context."""
        req.tokens = req.tokens + new_tokens
        if not req.use_cache:
            return
        leaf = self.tree.insert(req.tokens)
        old = req.node
        req.node = self.tree.pin(leaf)  # clean: near miss, replaces a pin that is dropped two lines below
        if old is not None:
            self.tree.unpin(old)


class WarmPrefixes:
    """System prompts that stay pinned until the tenant is removed."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self._by_tenant: Dict[str, Node] = {}

    def set_prompt(self, tenant: str, tokens: List[int]) -> None:
        node = self.tree.insert(tokens)
        self._by_tenant[tenant] = self.tree.pin(node)  # leak: a second prompt of the tenant overwrites the pinned entry

    def remove(self, tenant: str) -> None:
        node = self._by_tenant.pop(tenant, None)
        if node is not None:
            self.tree.unpin(node)


def main() -> None:
    tree = PrefixTree()
    runner = PrefixAwareRunner(tree, forward=len)
    tree.insert(list(range(12)))
    req = Request("a", list(range(16)))
    assert runner.begin(req) == 12
    runner.extend(req, [1, 2, 3, 4])
    runner.end("a")
    runner.score(req)
    runner.prefill_once(req)
    runner.longest_of([[0, 1, 2, 3], list(range(12))])
    runner.affinity([list(range(8))])
    runner.publish(req, 3)
    warm = WarmPrefixes(tree)
    warm.set_prompt("t", list(range(4)))
    warm.remove("t")


if __name__ == "__main__":
    main()
