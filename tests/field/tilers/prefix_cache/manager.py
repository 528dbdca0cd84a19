from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from .radix import RadixNode, RadixTree


class Request:
    def __init__(self, rid: int, tokens: Sequence[int]) -> None:
        self.rid = rid
        self.tokens = list(tokens)
        self.node: Optional[RadixNode] = None


class PrefixCacheManager:
    def __init__(self, tree: RadixTree, min_hit: int = 2) -> None:
        self.tree = tree
        self.min_hit = min_hit
        self._warm: Dict[str, RadixNode] = {}

    def attach(self, req: Request) -> int:
        if req.node is not None:
            return req.node.depth
        req.node = self.tree.match_prefix(req.tokens)  # clean: moved into the request, detach() drops it
        return req.node.depth

    def detach(self, req: Request) -> None:
        if req.node is None:
            return
        self.tree.drop_ref(req.node)
        req.node = None

    def reattach(self, req: Request) -> int:
        fresh = self.tree.match_prefix(req.tokens)  # clean: near miss, replaces the node whose reference is dropped first
        self.detach(req)
        req.node = fresh
        return fresh.depth

    def hit_length(self, tokens: Sequence[int]) -> int:
        return self.tree.match_prefix(tokens).depth  # leak: only the depth is kept, the reference is lost

    def has_prefix(self, tokens: Sequence[int]) -> bool:
        node = self.tree.match_prefix(tokens)  # clean: dropped before the answer
        hit = node.depth >= len(tokens)
        self.tree.drop_ref(node)
        return hit

    def usable_prefix(self, tokens: Sequence[int]) -> Optional[RadixNode]:
        """Referenced node for ``tokens``, or None when the hit is too short to be worth it."""
        node = self.tree.match_prefix(tokens)  # leak: a short hit returns None with the reference held
        if node.depth < self.min_hit:
            return None
        return node

    def plan_prefill(self, batch: Sequence[Request]) -> Dict[int, int]:
        todo: Dict[int, int] = {}
        for req in batch:
            node = self.usable_prefix(req.tokens)  # clean: near miss, None holds nothing, the rest dropped in the loop
            if node is None:
                todo[req.rid] = len(req.tokens)
                continue
            todo[req.rid] = len(req.tokens) - node.depth
            self.tree.drop_ref(node)
        return todo

    def warm(self, name: str, tokens: Sequence[int]) -> None:
        node = self.tree.insert(tokens)
        if name in self._warm:
            self.tree.drop_path(self._warm[name])
        self.tree.retain_path(node)  # clean: near miss, stored by name, the old path was dropped first
        self._warm[name] = node

    def cool(self, name: str) -> None:
        node = self._warm.pop(name, None)
        if node is not None:
            self.tree.drop_path(node)

    def evict(self, n: int) -> List[Any]:
        gone: List[Any] = []
        for _, leaf in self.tree.leaves():
            if len(gone) >= n:
                break
            if leaf.ref:
                continue
            parent = leaf.parent
            self.tree.retain(parent)  # leak: the root check continues without dropping the guard reference
            parent.children.pop(leaf.token)
            gone.append(leaf.token)
            if parent is self.tree.root:
                continue
            self.tree.drop_ref(parent)
        return gone
