from typing import Callable, Dict, List, NamedTuple

from .arena import DraftSlots, NodeArena
from .tree import DraftTree

Propose = Callable[[List[int]], List[int]]


class Draft(NamedTuple):
    slot: int
    tree: DraftTree


class SpecWorker:
    def __init__(self, arena: NodeArena, slots: DraftSlots, propose: Propose, depth: int = 4):
        self.arena = arena
        self.slots = slots
        self.propose = propose
        self.depth = depth
        self.drafts: Dict[str, Draft] = {}

    def start(self, rid: str, prompt: List[int]) -> bool:
        slot = self.slots.enter()  # leak: when the root does not fit the slot is not exited
        if slot < 0:
            return False
        tree = DraftTree(self.arena)
        if not tree.expand(prompt[-1:], [-1]):  # clean: near miss, upon False nothing was taken, else stop disposes the tree
            return False
        self.drafts[rid] = Draft(slot, tree)
        return True

    def stop(self, rid: str) -> None:
        draft = self.drafts.pop(rid, None)
        if draft is not None:
            draft.tree.dispose()
            self.slots.exit(draft.slot)

    def draft(self, rid: str, context: List[int]) -> int:
        tree = self.drafts[rid].tree
        for _ in range(self.depth):
            tokens = self.propose(context)
            if not tokens or not tree.expand(tokens, tree.levels[-1][:1] * len(tokens)):  # clean: the tree keeps the level until prune or stop
                break
            context = context + tokens[:1]
        return len(tree.levels)

    def score(self, context: List[int]) -> int:
        slot = self.slots.enter()  # clean: near miss, exited in finally whatever the expansion does
        if slot < 0:
            return 0
        tree = DraftTree(self.arena)
        try:
            for _ in range(self.depth):
                if not tree.expand(self.propose(context), [-1]):  # clean: disposed in finally
                    break
            return len(tree.levels)
        finally:
            tree.dispose()
            self.slots.exit(slot)

    def benchmark(self, context: List[int], rounds: int) -> int:
        total = 0
        for _ in range(rounds):
            tree = DraftTree(self.arena)
            if not tree.expand(self.propose(context), [-1]):  # leak: the tree of each round is dropped without dispose
                break
            total += len(tree.levels)
        return total
