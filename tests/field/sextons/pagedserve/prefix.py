from __future__ import annotations

from dataclasses import dataclass, field

from .pools import TokenPool


@dataclass(eq=False)
class Node:
    token: int = -1
    slot: int = -1
    parent: "Node | None" = None
    children: dict[int, "Node"] = field(default_factory=dict)
    locks: int = 0


class PrefixTree:
    def __init__(self, pool: TokenPool) -> None:
        self.root = Node()
        self.pool = pool

    def match(self, tokens: list[int]) -> tuple[Node, list[int]]:
        node, slots = self.root, []
        for t in tokens:
            nxt = node.children.get(t)
            if nxt is None:
                break
            slots.append(nxt.slot)
            node = nxt
        return node, slots

    def lock(self, node: Node) -> None:
        cur: Node | None = node
        while cur is not None:
            cur.locks += 1
            cur = cur.parent

    def unlock(self, node: Node) -> None:
        cur: Node | None = node
        while cur is not None:
            cur.locks -= 1
            cur = cur.parent

    def insert(self, tokens: list[int], slots: list[int]) -> list[int]:
        """Takes over the slots and returns those of tokens that the tree has already under another slot."""
        node, spare = self.root, []
        for t, s in zip(tokens, slots):
            nxt = node.children.get(t)
            if nxt is None:
                nxt = Node(t, s, node)
                node.children[t] = nxt
            elif nxt.slot != s:
                spare.append(s)
            node = nxt
        return spare

    def evict(self, n: int) -> int:
        freed = 0
        stack = [self.root]
        leaves: list[Node] = []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node.locks == 0 and node is not self.root:
                leaves.append(node)
        for leaf in leaves[:n]:
            del leaf.parent.children[leaf.token]
            self.pool.free([leaf.slot])
            freed += 1
        return freed
