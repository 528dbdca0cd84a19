"""Draft and verify steps over tenant slots."""
from dataclasses import dataclass
from typing import Callable, Optional

from .slots import TenantSlots, TreeSlots

Tree = tuple[int, ...]


@dataclass
class Proposal:
    tenant: str
    tree: Optional[Tree] = None


class SpecWorker:
    """Proposals wait in pending, accepted ones in verified."""

    def __init__(self, slots: TenantSlots, scratch: TreeSlots, draft: Callable[[Tree], int]) -> None:
        self.slots = slots
        self.scratch = scratch
        self.draft = draft
        self.pending: list[Proposal] = []
        self.verified: dict[int, Proposal] = {}

    def propose(self, tenant: str, nodes: int) -> bool:
        proposal = Proposal(tenant)
        proposal.tree = self.slots.seize_for(tenant, nodes)  # clean: near miss, dropped only when refused, else verify cedes
        if proposal.tree is None:
            return False
        self.pending.append(proposal)
        return True

    def verify(self, accept: Callable[[Tree], int]) -> int:
        kept = 0
        while self.pending:
            proposal = self.pending.pop()
            step = accept(proposal.tree)
            if step < 0 or step in self.verified:
                self.slots.cede_for(proposal.tenant, proposal.tree)
                continue
            self.verified[step] = proposal
            kept += 1
        return kept

    def flush(self) -> None:
        for proposal in self.verified.values():
            self.slots.cede_for(proposal.tenant, proposal.tree)
        self.verified.clear()

    def propose_deep(self, tenant: str, nodes: int, depth: int) -> bool:
        proposal = Proposal(tenant)
        for _ in range(depth):
            proposal.tree = self.slots.seize_for(tenant, nodes)  # leak: each level overwrites the tree above it
            if proposal.tree is None:
                return False
            self.draft(proposal.tree)
        self.pending.append(proposal)
        return True

    def propose_shrinking(self, tenant: str, nodes: int) -> bool:
        tree = None
        while tree is None and nodes > 0:
            tree = self.slots.seize_for(tenant, nodes)  # clean: near miss, loop rebinds only None
            nodes //= 2
        if tree is None:
            return False
        self.pending.append(Proposal(tenant, tree))
        return True

    def acceptance(self, tenant: str, nodes: int, rounds: int) -> float:
        hits = 0
        for _ in range(rounds):
            tree = self.slots.seize_for(tenant, nodes)  # leak: ceded once after the loop, only the last tree
            if tree is None:
                return 0.0
            hits += self.draft(tree)
        if rounds:
            self.slots.cede_for(tenant, tree)
        return hits / max(rounds, 1)

    def compare(self, small: int, large: int) -> Optional[bool]:
        a = self.scratch.seize_tree(small)  # clean: near miss, ceded in finally when the large one fails
        b = None
        try:
            if a is None:
                return None
            b = self.scratch.seize_tree(large)  # clean: ceded in finally
            if b is None:
                return None
            return self.draft(a) > self.draft(b)
        finally:
            for tree in (a, b):
                if tree is not None:
                    self.scratch.cede_tree(tree)
