import collections
import logging
import random
import threading
from typing import Deque, List, Optional, Tuple

import numpy as np
import torch

log = logging.getLogger("rl.replay")


class EpisodeBlock:
    __slots__ = ("bid", "obs", "n")

    def __init__(self, bid: int, steps: int, obs_dim: int):
        self.bid = bid
        self.obs = np.zeros((steps, obs_dim), np.float32)
        self.n = 0

    def full(self) -> bool:
        return self.n == len(self.obs)


class BlockDepot:
    def __init__(self, blocks: int, steps: int, dim: int):
        self._blocks: Deque[EpisodeBlock] = collections.deque(EpisodeBlock(i, steps, dim) for i in range(blocks))
        self._cond = threading.Condition()

    def draw(self, wait: bool = True) -> Optional[EpisodeBlock]:
        with self._cond:  # clean: with releases
            while not self._blocks:
                if not wait:
                    return None
                self._cond.wait()
            blk = self._blocks.popleft()  # clean: handed to the caller
            blk.n = 0
            return blk

    def restock(self, blk: EpisodeBlock) -> None:
        with self._cond:  # clean: with releases
            self._blocks.append(blk)
            self._cond.notify()


class ReplayBuffer:
    def __init__(self, depot: BlockDepot, capacity: int):
        self.depot = depot
        self.capacity = capacity
        self.episodes: List[EpisodeBlock] = []
        self.bounded: Deque[EpisodeBlock] = collections.deque(maxlen=capacity)
        self.current: Optional[EpisodeBlock] = None

    def append(self, obs: np.ndarray) -> None:
        if self.current is None:
            self.current = self.depot.draw()  # clean: near miss, moved to the episodes when full, flush() empties both
        self.current.obs[self.current.n] = obs
        self.current.n += 1
        if self.current.full():
            self._commit(self.current)
            self.current = None

    def _commit(self, blk: EpisodeBlock) -> None:
        if len(self.episodes) >= self.capacity:
            victim = self.episodes.pop(random.randrange(len(self.episodes)))
            self.depot.restock(victim)
        self.episodes.append(blk)

    def flush(self) -> None:
        if self.current is not None:
            self.depot.restock(self.current)
            self.current = None
        for blk in self.episodes:
            self.depot.restock(blk)
        self.episodes = []

    def add_episode(self, rows: np.ndarray) -> bool:
        blk = self.depot.draw(wait=False)  # leak: the episode that is too long returns with the block
        if blk is None:
            return False
        if len(rows) > len(blk.obs):
            log.warning("episode of %d steps", len(rows))
            return False
        blk.obs[: len(rows)] = rows
        blk.n = len(rows)
        self._commit(blk)
        return True

    def add_recent(self, rows: np.ndarray) -> None:
        blk = self.depot.draw()  # leak: the bounded deque throws the oldest block out silently
        blk.obs[: len(rows)] = rows
        self.bounded.append(blk)

    def restart(self) -> None:
        old, self.current = self.current, self.depot.draw()  # clean: near miss, the old one is restocked, flush() does the new
        if old is not None:
            self.depot.restock(old)

    def sample(self, k: int) -> torch.Tensor:
        scratch = self.depot.draw()  # clean: restocked before the return
        k = min(k, len(scratch.obs))
        for i in range(k):
            ep = random.choice(self.episodes)
            scratch.obs[i] = ep.obs[random.randrange(ep.n)]
        out = torch.from_numpy(scratch.obs[:k].copy())
        self.depot.restock(scratch)
        return out

    def sample_mean(self, k: int) -> torch.Tensor:
        scratch = self.depot.draw()  # leak: the mean is a tensor of its own, the block is never restocked
        for i in range(k):
            scratch.obs[i] = random.choice(self.episodes).obs[0]
        return torch.from_numpy(scratch.obs[:k]).mean(0)

    def export(self) -> List[EpisodeBlock]:
        """The caller restocks the copies."""
        out = []
        for ep in self.episodes:
            dup = self.depot.draw(wait=False)  # clean: the list goes to the caller
            if dup is None:
                break
            dup.obs[:] = ep.obs
            dup.n = ep.n
            out.append(dup)
        return out


def mean_return(rb: ReplayBuffer) -> float:
    copies = rb.export()  # clean: near miss, an empty export has nothing to restock
    if not copies:
        return 0.0
    value = float(np.mean([c.obs[: c.n].sum() for c in copies]))
    for c in copies:
        rb.depot.restock(c)
    return value


def longest(rb: ReplayBuffer) -> Tuple[int, int]:
    copies = rb.export()  # leak: filtered to the full ones, the others are not restocked
    full = [c for c in copies if c.full()]
    best = max((c.n for c in full), default=0)
    for c in full:
        rb.depot.restock(c)
    return best, len(full)
