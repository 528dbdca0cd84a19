"""Speculative decoding: KV positions are granted in amounts and handed back after verification."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field


class PositionBudget:
    """Counts KV positions; callers must put back just what they were granted."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used = 0
        self._mutex = threading.Lock()

    def grab(self, amount: int) -> bool:
        with self._mutex:
            if self._used + amount > self._total:
                return False
            self._used += amount
            return True

    def put(self, amount: int) -> None:
        with self._mutex:
            self._used -= amount

    @property
    def free(self) -> int:
        return self._total - self._used


@dataclass
class TreeNode:
    token: int
    children: list["TreeNode"] = field(default_factory=list)


def flatten(root: TreeNode) -> list[TreeNode]:
    out, stack = [], [root]
    while stack:
        node = stack.pop()
        out.append(node)
        stack.extend(node.children)
    return out


@dataclass
class Sequence:
    tokens: list[int]
    held: int = 0
    finished: bool = False


class DraftModel:
    def propose(self, tokens: list[int], k: int) -> list[int]:
        return [(tokens[-1] + i) % 32000 for i in range(1, k + 1)]

    def tree(self, tokens: list[int], width: int) -> TreeNode:
        root = TreeNode(tokens[-1])
        root.children = [TreeNode(t) for t in self.propose(tokens, width)]
        return root


class TargetModel:
    def accept(self, tokens: list[int], draft: list[int]) -> int:
        return sum(1 for i, t in enumerate(draft) if (t + i) % 3)

    def best_leaf(self, nodes: list[TreeNode]) -> TreeNode:
        return max(nodes, key=lambda n: n.token)


class Speculator:
    def __init__(self, budget: PositionBudget, draft: DraftModel, target: TargetModel) -> None:
        self.budget = budget
        self.draft = draft
        self.target = target

    def score_only(self, tokens: list[int], k: int) -> int:
        """Acceptance length, without keeping anything in the KV cache."""
        if not self.budget.grab(k + 1):  # leak: k + 1 positions are granted and k put back
            return 0
        proposed = self.draft.propose(tokens, k)
        accepted = self.target.accept(tokens, proposed)
        self.budget.put(k)
        return accepted

    def score_with_bonus(self, tokens: list[int], k: int) -> int:
        if not self.budget.grab(k + 1):  # clean: near miss, k and then the bonus position are put back
            return 0
        proposed = self.draft.propose(tokens, k)
        accepted = self.target.accept(tokens, proposed)
        self.budget.put(k)
        bonus = accepted + 1 if accepted == k else accepted
        self.budget.put(1)
        return bonus

    def score_tree(self, tokens: list[int], width: int) -> int | None:
        root = self.draft.tree(tokens, width)
        nodes = flatten(root)
        if not self.budget.grab(len(nodes)):  # leak: the inner nodes' positions are not put back
            return None
        leaves = [n for n in nodes if not n.children]
        best = self.target.best_leaf(leaves)
        self.budget.put(len(leaves))
        return best.token

    def score_tree_full(self, tokens: list[int], width: int) -> int | None:
        root = self.draft.tree(tokens, width)
        nodes = flatten(root)
        if not self.budget.grab(len(nodes)):  # clean: near miss, leaves and inner nodes together are all nodes
            return None
        leaves = [n for n in nodes if not n.children]
        best = self.target.best_leaf(leaves)
        self.budget.put(len(leaves))
        self.budget.put(len(nodes) - len(leaves))
        return best.token


class SequenceRunner:
    """The rejected part of a draft is put back at once, the accepted part when the sequence ends."""

    def __init__(self, budget: PositionBudget, draft: DraftModel, target: TargetModel) -> None:
        self.budget = budget
        self.draft = draft
        self.target = target

    def step(self, seq: Sequence, k: int) -> int:
        if not self.budget.grab(k):  # clean: near miss, the rejected part goes back now, the rest in finish
            return 0
        proposed = self.draft.propose(seq.tokens, k)
        accepted = self.target.accept(seq.tokens, proposed)
        seq.tokens.extend(proposed[:accepted])
        seq.held += accepted
        self.budget.put(k - accepted)
        return accepted

    def finish(self, seq: Sequence) -> None:
        self.budget.put(seq.held)
        seq.held = 0
        seq.finished = True


class EagerRunner:
    """Each drafted position is kept until the sequence ends."""

    def __init__(self, budget: PositionBudget, draft: DraftModel, target: TargetModel) -> None:
        self.budget = budget
        self.draft = draft
        self.target = target
        self.live: list[Sequence] = []

    def start(self, tokens: list[int]) -> Sequence | None:
        if not self.budget.grab(len(tokens)):  # leak: generate sets held anew, so that finish never puts this back
            return None
        seq = Sequence(list(tokens), held=len(tokens))
        self.live.append(seq)
        return seq

    def generate(self, seq: Sequence, k: int) -> int:
        if not self.budget.grab(k):  # leak: held remembers the last step's amount only
            return 0
        seq.held = k
        proposed = self.draft.propose(seq.tokens, k)
        accepted = self.target.accept(seq.tokens, proposed)
        seq.tokens.extend(proposed[:accepted])
        return accepted

    def finish(self, seq: Sequence) -> None:
        self.live.remove(seq)
        self.budget.put(seq.held)
        seq.held = 0
        seq.finished = True


def admit_pair(budget: PositionBudget, prompt: int, draft: int) -> bool:
    """Whether target and draft caches would both hold the prompt."""
    if not budget.grab(prompt):  # leak: where the draft part is refused, the prompt part is not put back
        return False
    if not budget.grab(draft):  # clean: put back below
        return False
    fits = budget.free >= 0
    budget.put(draft)
    budget.put(prompt)
    return fits


def admit_pair_undo(budget: PositionBudget, prompt: int, draft: int) -> bool:
    if not budget.grab(prompt):  # clean: near miss, put back on the refusal of the second
        return False
    if not budget.grab(draft):  # clean: put back below
        budget.put(prompt)
        return False
    fits = budget.free >= 0
    budget.put(draft + prompt)
    return fits
