from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional


@dataclass(eq=False)
class Node:
    name: str
    rack: str
    gpus: int = 8
    healthy: bool = True


class Inventory:
    """Nodes are claimed for maintenance or as spares and surrendered afterwards."""

    def __init__(self, nodes: Iterable[Node]):
        self._idle: Dict[str, Node] = {n.name: n for n in nodes}
        self._claimed: Dict[str, str] = {}

    def claim(self, owner: str, rack: Optional[str] = None) -> Optional[Node]:
        for name, node in self._idle.items():
            if rack is None or node.rack == rack:
                del self._idle[name]
                self._claimed[name] = owner
                return node
        return None

    def surrender(self, node: Node) -> None:
        del self._claimed[node.name]
        self._idle[node.name] = node

    def claim_group(self, owner: str, n: int, rack: Optional[str] = None) -> Optional[List[Node]]:
        """All in one rack, or None."""
        group: List[Node] = []
        for _ in range(n):
            node = self.claim(owner, rack)  # leak: a group that cannot be completed is dropped
            if node is None:
                return None
            rack = node.rack
            group.append(node)
        return group

    def claim_healthy(self, owner: str) -> Optional[Node]:
        skipped: List[Node] = []
        found = None
        while found is None:
            node = self.claim(owner)  # clean: near miss, unhealthy ones are set aside and surrendered below
            if node is None:
                break
            if node.healthy:
                found = node
            else:
                skipped.append(node)
        for node in skipped:
            self.surrender(node)
        return found

    @property
    def claimed(self) -> Dict[str, str]:
        return dict(self._claimed)
