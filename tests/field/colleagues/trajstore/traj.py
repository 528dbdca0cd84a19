"""Trajectories with a use count on the element; the last drop frees the arrays."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterator, Optional

import torch

class Shelf:
    """Token planes by slot number, a stack of idle numbers."""

    def __init__(self, slots: int, length: int) -> None:
        self.tokens = torch.zeros(slots, length, dtype=torch.int32)
        self.logps = torch.zeros(slots, length)
        self.stack = list(range(slots))

@dataclass(eq=False)
class Traj:
    shelf: Shelf
    slot: int
    uses: int = 1
    reward: Optional[float] = None
    tags: set[str] = field(default_factory=set)

    def hold(self) -> "Traj":
        self.uses += 1
        return self

    def drop(self) -> None:
        self.uses -= 1
        if self.uses == 0:
            self.shelf.stack.append(self.slot)
            self.slot = -1

def open_traj(shelf: Shelf, prompt: list[int]) -> Optional[Traj]:
    """New trajectory with one use for the caller; None if full or too long."""
    if not shelf.stack:
        return None
    slot = shelf.stack.pop()  # leak: too long a prompt returns None with the slot popped
    if len(prompt) > shelf.tokens.shape[1]:
        return None
    shelf.tokens[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
    return Traj(shelf, slot)

def open_group(shelf: Shelf, prompt: list[int], n: int) -> Optional[list[Traj]]:
    """n samples of one prompt, or None."""
    group: list[Traj] = []
    for _ in range(n):
        t = open_traj(shelf, prompt)  # clean: near miss, shortfall drops the group; else caller's
        if t is None:
            for g in group:
                g.drop()
            return None
        group.append(t)
    return group

def rewarded(trajs: list[Traj]) -> Iterator[Traj]:
    """Yields held trajectories; the consumer drops each."""
    for t in trajs:
        if t.reward is None:
            continue
        yield t.hold()  # clean: the yielded use belongs to the consumer
