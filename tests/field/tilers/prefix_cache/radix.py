"""Radix tree of cached prefixes with reference-counted nodes."""
from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple


class RadixNode:
    def __init__(self, token: Optional[int], parent: Optional["RadixNode"]) -> None:
        self.token = token
        self.parent = parent
        self.children: Dict[int, RadixNode] = {}
        self.ref = 0
        self.depth = 0 if parent is None else parent.depth + 1
        self.last_used = 0


class RadixTree:
    def __init__(self) -> None:
        self.root = RadixNode(None, None)
        self.clock = 0

    def retain(self, node: RadixNode) -> None:
        node.ref += 1
        self.clock += 1
        node.last_used = self.clock

    def drop_ref(self, node: RadixNode) -> None:
        if node.ref <= 0:
            raise RuntimeError("reference count underflow")
        node.ref -= 1

    def insert(self, tokens: Sequence[int]) -> RadixNode:
        node = self.root
        for t in tokens:
            node = node.children.setdefault(t, RadixNode(t, node))
        return node

    def match_prefix(self, tokens: Sequence[int]) -> RadixNode:
        """Deepest cached node of ``tokens``; the caller holds a reference."""
        node = self.root
        for t in tokens:
            child = node.children.get(t)
            if child is None:
                break
            node = child
        self.retain(node)  # clean: the reference is the caller's with the returned node
        return node

    def retain_path(self, node: RadixNode) -> None:
        cur: Optional[RadixNode] = node
        while cur is not None:
            self.retain(cur)  # clean: near miss, drop_path walks the same parents
            cur = cur.parent

    def drop_path(self, node: RadixNode) -> None:
        cur: Optional[RadixNode] = node
        while cur is not None:
            self.drop_ref(cur)
            cur = cur.parent

    def leaves(self) -> List[Tuple[int, RadixNode]]:
        stack, out = [self.root], []
        while stack:
            n = stack.pop()
            stack.extend(n.children.values())
            if not n.children and n is not self.root:
                out.append((n.last_used, n))
        return sorted(out, key=lambda p: p[0])
