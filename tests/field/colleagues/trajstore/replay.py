"""Replay buffer and learner on counted trajectories."""
from __future__ import annotations

import collections
import random
import threading
from typing import Callable, Optional

import torch

from .traj import Shelf, Traj, open_group, open_traj, rewarded

class Replay:
    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.items: collections.deque[Traj] = collections.deque()
        self.best: Optional[Traj] = None
        self.worst: Optional[Traj] = None
        self.mu = threading.Lock()

    def add(self, t: Traj) -> None:
        """Keeps a use of its own."""
        with self.mu:
            self.items.append(t.hold())  # clean: dropped on eviction and in purge()
            if len(self.items) > self.cap:
                self.items.popleft().drop()

    def note_extremes(self, t: Traj) -> None:
        with self.mu:
            if self.best is None or t.reward > self.best.reward:
                if self.best is not None:
                    self.best.drop()
                self.best = t.hold()  # clean: near miss, former best dropped first; purge() drops it
            if self.worst is None or t.reward < self.worst.reward:
                self.worst = t.hold()  # leak: former worst is overwritten without a drop

    def sample(self, n: int) -> list[Traj]:
        """Held for the caller."""
        with self.mu:
            picked = random.sample(self.items, min(n, len(self.items)))
            return [t.hold() for t in picked]  # clean: caller drops each

    def purge(self) -> None:
        with self.mu:
            while self.items:
                self.items.pop().drop()
            for t in (self.best, self.worst):
                if t is not None:
                    t.drop()
            self.best = self.worst = None

def collect(shelf: Shelf, replay: Replay, prompt: list[int], n: int, play: Callable[[Traj], float]) -> int:
    group = open_group(shelf, prompt, n)  # clean: near miss, replay holds its own; each dropped here
    if group is None:
        return 0
    for t in group:
        t.reward = play(t)
        replay.add(t)
        t.drop()
    return len(group)

def collect_filtered(shelf: Shelf, replay: Replay, prompt: list[int], play: Callable[[Traj], float]) -> bool:
    t = open_traj(shelf, prompt)  # leak: zero reward returns before the drop
    if t is None:
        return False
    t.reward = play(t)
    if t.reward == 0.0:
        return False
    replay.add(t)
    t.drop()
    return True

def learn(replay: Replay, n: int, step: Callable[[torch.Tensor], None]) -> int:
    batch = replay.sample(n)  # leak: an undersized batch returns without drops
    if len(batch) < n:
        return 0
    step(torch.stack([t.shelf.tokens[t.slot] for t in batch]))
    for t in batch:
        t.drop()
    return n

def mean_reward(trajs: list[Traj]) -> float:
    total, n = 0.0, 0
    for t in rewarded(trajs):  # clean: dropped in each round
        total += t.reward
        n += 1
        t.drop()
    return total / max(n, 1)

def top_reward(trajs: list[Traj]) -> float:
    return max((t.reward for t in rewarded(trajs)), default=0.0)  # leak: yielded uses are never dropped

def swap_sample(replay: Replay, batch: list[Traj], i: int) -> None:
    fresh = replay.sample(1)  # clean: near miss, takes batch[i]'s place after its drop
    if not fresh:
        return
    batch[i].drop()
    batch[i] = fresh[0]
