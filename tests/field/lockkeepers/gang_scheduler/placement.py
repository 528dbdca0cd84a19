"""Where jobs go."""
from __future__ import annotations

import logging
from typing import Callable, Iterator, Optional

from .inventory import Inventory, NodeGrant, QuotaInventory

log = logging.getLogger("gang.placement")


class Placer:
    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.waiting: list = []

    def any_node(self, gpus: int) -> Optional[NodeGrant]:
        for node in self.inventory.nodes():
            g = self.inventory.grant(node, gpus)  # clean: handed to the caller
            if g is not None:
                return g
        return None

    def probe_capacity(self, gpus: int) -> bool:
        g = self.any_node(gpus)  # leak: only whether there was one is answered
        return g is not None

    def has_room(self, gpus: int) -> bool:
        g = self.any_node(gpus)  # clean: near miss, the probe is returned at once
        if g is None:
            return False
        self.inventory.ungrant(g)
        return True

    def pair(self, gpus: int) -> Optional[tuple]:
        """A grant for the actor and one for the learner, on different nodes; the caller's."""
        actor = self.any_node(gpus)  # clean: near miss, ungranted on both failures
        if actor is None:
            return None
        for node in self.inventory.nodes():
            if node == actor.node:
                continue
            learner = self.inventory.grant(node, gpus)  # clean: handed to the caller in the pair
            if learner is not None:
                return actor, learner
        self.inventory.ungrant(actor)
        return None

    def colocate(self, gpus: int, link: Callable[[str, str], bool]) -> bool:
        both = self.pair(gpus)  # leak: a missing link returns before the two are ungranted
        if both is None:
            return False
        actor, learner = both
        if not link(actor.node, learner.node):
            log.info("no link %s-%s", actor.node, learner.node)
            return False
        self.inventory.ungrant(learner)
        self.inventory.ungrant(actor)
        return True


def drain_plan(inventory: Inventory, nodes: list) -> Iterator[str]:
    """Blocks each node while the caller works on it."""
    for node in nodes:
        g = inventory.grant(node, inventory.free_on(node))  # clean: the generator ungrants after each step
        if g is None:
            continue
        try:
            yield node
        finally:
            inventory.ungrant(g)


def audit_team(inventory: QuotaInventory, team: str) -> dict:
    room = {}
    for node in inventory.nodes():
        g = inventory.lend_for(team, node, 1)  # leak: an odd grant goes on to the next turn without ungrant
        if g is None:
            room[node] = 0
            continue
        if g.ident % 2:
            room[node] = g.gpus
            continue
        room[node] = inventory.free_on(node) + 1
        inventory.ungrant(g)
    return room
