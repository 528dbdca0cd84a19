from __future__ import annotations

from collections.abc import Iterable


class Node:
    def __init__(self, name: str, client, cap: int) -> None:
        self.name = name
        self.client = client
        self.cap = cap
        self.load = 0
        self.draining = False


class Registry:
    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = {n.name: n for n in nodes}
        self.sticky: dict[str, Node] = {}

    def charge(self, name: str) -> Node | None:
        node = self.nodes.get(name)
        if node is None or node.load >= node.cap:
            return None
        node.load += 1
        return node

    def discharge(self, node: Node) -> None:
        node.load -= 1

    def charge_least(self) -> Node | None:
        for n in sorted(self.nodes.values(), key=lambda n: n.load):
            node = self.charge(n.name)  # leak: a draining node is passed over with its charge left on
            if node is None:
                continue
            if node.draining:
                continue
            return node
        return None

    def charge_awake(self) -> Node | None:
        for n in list(self.nodes.values()):
            node = self.charge(n.name)  # clean: near miss, a draining node is discharged before the next is tried
            if node is not None:
                if not node.draining:
                    return node
                self.discharge(node)
        return None

    def stick(self, session: str, name: str) -> bool:
        node = self.charge(name)  # clean: near miss, the node the session had is discharged
        if node is None:
            return False
        prev = self.sticky.get(session)
        if prev is not None:
            self.discharge(prev)
        self.sticky[session] = node
        return True

    def unstick(self, session: str) -> None:
        node = self.sticky.pop(session, None)
        if node is not None:
            self.discharge(node)
