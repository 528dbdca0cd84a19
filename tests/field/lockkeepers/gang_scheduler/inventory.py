"""The nodes and what is granted of them."""
from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class NodeGrant:
    ident: int
    node: str
    gpus: int


class Inventory:
    """grant() takes GPUs of a node, ungrant() returns them."""

    def __init__(self, nodes: dict) -> None:
        self._free = dict(nodes)
        self._ids = itertools.count(1)
        self._live: dict = {}
        self._mutex = threading.Lock()

    def grant(self, node: str, gpus: int) -> Optional[NodeGrant]:
        with self._mutex:
            if self._free.get(node, 0) < gpus:
                return None
            self._free[node] -= gpus
            g = NodeGrant(next(self._ids), node, gpus)
            self._live[g.ident] = g
            return g

    def ungrant(self, g: NodeGrant) -> None:
        with self._mutex:
            if self._live.pop(g.ident, None) is not None:
                self._free[g.node] += g.gpus

    def free_on(self, node: str) -> int:
        with self._mutex:
            return self._free.get(node, 0)

    def nodes(self) -> list:
        return sorted(self._free)


class QuotaInventory(Inventory):
    """Grants count against the quota of a team as well."""

    def __init__(self, nodes: dict, quota: dict) -> None:
        super().__init__(nodes)
        self.quota = dict(quota)
        self._team_of: dict = {}

    def grant_for(self, team: str, node: str, gpus: int) -> Optional[NodeGrant]:
        g = self.grant(node, gpus)  # leak: a team over its quota gets None while the node stays granted
        if g is None:
            return None
        if self.quota.get(team, 0) < gpus:
            return None
        self.quota[team] -= gpus
        self._team_of[g.ident] = team
        return g

    def lend_for(self, team: str, node: str, gpus: int) -> Optional[NodeGrant]:
        if self.quota.get(team, 0) < gpus:
            return None
        g = self.grant(node, gpus)  # clean: near miss, None or handed to the caller
        if g is not None:
            self.quota[team] -= gpus
            self._team_of[g.ident] = team
        return g

    def ungrant(self, g: NodeGrant) -> None:
        team = self._team_of.pop(g.ident, None)
        if team is not None:
            self.quota[team] += g.gpus
        super().ungrant(g)
