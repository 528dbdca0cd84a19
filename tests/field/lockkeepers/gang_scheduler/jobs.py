"""Jobs hold their grants until they stop."""
from __future__ import annotations

import logging
from typing import Optional

from .inventory import Inventory, NodeGrant

log = logging.getLogger("gang.jobs")


class GangJob:
    """All ranks or none."""

    def __init__(self, name: str, inventory: Inventory, gpus_per_node: int) -> None:
        self.name = name
        self.inventory = inventory
        self.gpus_per_node = gpus_per_node
        self.grants: list = []
        self.state = "pending"

    def start(self, nodes: list) -> bool:
        for node in nodes:
            g = self.inventory.grant(node, self.gpus_per_node)  # clean: near miss, stop() ungrants all
            if g is None:
                self.stop()
                return False
            self.grants.append(g)
        self.state = "running"
        return True

    def stop(self) -> None:
        for g in self.grants:
            self.inventory.ungrant(g)
        self.grants.clear()
        self.state = "stopped"


class ElasticJob:
    """Grows and shrinks between min and max nodes."""

    def __init__(self, name: str, inventory: Inventory) -> None:
        self.name, self.inventory = name, inventory
        self.members: dict = {}
        self.epoch = 0

    def grow(self, node: str, gpus: int) -> bool:
        if node in self.members:
            return False
        g = self.inventory.grant(node, gpus)  # clean: shrink() and finish() ungrant the members
        if g is None:
            return False
        self.members[node] = g
        self.epoch += 1
        return True

    def shrink(self, node: str) -> bool:
        g = self.members.pop(node, None)
        if g is None:
            return False
        self.inventory.ungrant(g)
        self.epoch += 1
        return True

    def finish(self) -> None:
        while self.members:
            _, g = self.members.popitem()
            self.inventory.ungrant(g)


class SpotJob:
    """Runs on left-over GPUs and is evicted when somebody else wants them."""

    def __init__(self, name: str, inventory: Inventory) -> None:
        self.name, self.inventory = name, inventory
        self.members: dict = {}
        self.evictions = 0

    def grow(self, node: str) -> bool:
        free = self.inventory.free_on(node)
        if free == 0 or node in self.members:
            return False
        g = self.inventory.grant(node, free)  # leak: evict() takes the member out and does not ungrant
        if g is None:
            return False
        self.members[node] = g
        return True

    def evict(self, node: str) -> Optional[int]:
        g = self.members.pop(node, None)
        if g is None:
            return None
        self.evictions += 1
        log.info("%s evicted from %s", self.name, node)
        return g.gpus

    def finish(self) -> None:
        for g in self.members.values():
            self.inventory.ungrant(g)
        self.members.clear()


class DebugJob:
    """A single GPU for an interactive shell."""

    def __init__(self, inventory: Inventory, node: str, exclusive: bool) -> None:
        self.inventory, self.node = inventory, node
        self.exclusive = exclusive
        self.grant: Optional[NodeGrant] = None
        self.companion: Optional[NodeGrant] = None

    def open(self) -> bool:
        self.grant = self.inventory.grant(self.node, 1)  # clean: shut() ungrants it
        if self.grant is None:
            return False
        if self.exclusive:
            rest = self.inventory.free_on(self.node)
            self.companion = self.inventory.grant(self.node, rest)  # leak: shut() only clears the field
        return True

    def shut(self) -> None:
        if self.grant is not None:
            self.inventory.ungrant(self.grant)
        self.grant = None
        self.companion = None
