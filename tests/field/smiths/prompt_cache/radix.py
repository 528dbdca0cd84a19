from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple


@dataclass(eq=False)
class Node:
    tokens: Tuple[int, ...] = ()
    parent: Optional["Node"] = None
    children: Dict[int, "Node"] = field(default_factory=dict)
    locks: int = 0
    depth: int = 0


class PrefixTree:
    """A locked node and its ancestors survive eviction. Every lock_path() needs an unlock_path()."""

    def __init__(self, page: int = 2) -> None:
        self.root = Node()
        self.page = page
        self.total_locks = 0

    def lock_path(self, node: Node) -> Node:
        cur: Optional[Node] = node
        while cur is not None:
            cur.locks += 1
            cur = cur.parent
        self.total_locks += 1
        return node

    def unlock_path(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.locks -= 1
            cur = cur.parent
        self.total_locks -= 1

    def find(self, tokens: Sequence[int]) -> Node:
        cur, i = self.root, 0
        while i < len(tokens):
            child = cur.children.get(tokens[i])
            if child is None or tuple(tokens[i : i + len(child.tokens)]) != child.tokens:
                break
            cur, i = child, i + len(child.tokens)
        return cur

    def match(self, tokens: Sequence[int]) -> Node:
        return self.lock_path(self.find(tokens))  # clean: wrapper, the caller unlocks

    def match_min(self, tokens: Sequence[int], least: int) -> Optional[Node]:
        node = self.match(tokens)  # clean: unlocked when too short, else returned
        if node.depth < least:
            self.unlock_path(node)
            return None
        return node

    def insert(self, tokens: Sequence[int]) -> Node:
        """Not locked: the caller locks what it wants to keep."""
        cur = self.find(tokens)
        for i in range(cur.depth, len(tokens), self.page):
            part = tuple(tokens[i : i + self.page])
            child = Node(part, cur, depth=cur.depth + len(part))
            cur.children[part[0]] = child
            cur = child
        return cur

    def evict(self, want: int) -> int:
        freed = 0
        stack = [self.root]
        while stack and freed < want:
            node = stack.pop()
            for key, child in list(node.children.items()):
                if child.locks == 0 and not child.children:
                    del node.children[key]
                    freed += len(child.tokens)
                else:
                    stack.append(child)
        return freed
