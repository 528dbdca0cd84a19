"""Rollout storage for RL fine-tuning."""
import logging
import random
from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, Iterator, List, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class Slab:
    tokens: torch.Tensor
    logp: torch.Tensor
    used: int = 0
    reward: float = 0.0


class SlabPool:
    def __init__(self, count: int, length: int):
        self._spare: Deque[Slab] = deque(
            Slab(torch.zeros(length, dtype=torch.long), torch.zeros(length)) for _ in range(count)
        )

    def checkout_slab(self) -> Optional[Slab]:
        try:
            return self._spare.popleft()
        except IndexError:
            return None

    def checkin_slab(self, slab: Slab) -> None:
        slab.used = 0
        slab.reward = 0.0
        self._spare.append(slab)


class RolloutBuffer:
    def __init__(self, pool: SlabPool, policy, reward_fn):
        self.pool = pool
        self.policy = policy
        self.reward_fn = reward_fn
        self.episodes: List[Slab] = []
        self.best: Optional[Slab] = None
        self.by_task: Dict[str, Slab] = {}

    def _fill(self, slab: Slab, prompt: List[int]) -> None:
        toks, logp = self.policy.sample(prompt)
        slab.used = len(toks)
        slab.tokens[: slab.used] = torch.tensor(toks)
        slab.logp[: slab.used] = torch.tensor(logp)
        slab.reward = self.reward_fn(toks)

    def rollout(self, prompts: List[List[int]]) -> int:
        n = 0
        for p in prompts:
            slab = self.pool.checkout_slab()  # clean: appended to episodes, which clear checks in
            if slab is None:
                break
            self._fill(slab, p)
            self.episodes.append(slab)
            n += 1
        return n

    def rollout_filtered(self, prompts: List[List[int]], floor: float) -> int:
        n = 0
        for p in prompts:
            slab = self.pool.checkout_slab()  # leak: low rewards are filtered out together with the slab
            if slab is None:
                break
            self._fill(slab, p)
            if slab.reward >= floor:
                self.episodes.append(slab)
                n += 1
        return n

    def rollout_nonempty(self, prompts: List[List[int]]) -> int:
        n = 0
        for p in prompts:
            slab = self.pool.checkout_slab()  # clean: near miss, empty samples are checked in before continue
            if slab is None:
                break
            self._fill(slab, p)
            if slab.used == 0:
                self.pool.checkin_slab(slab)
                continue
            self.episodes.append(slab)
            n += 1
        return n

    def keep_best(self, prompt: List[int]) -> float:
        slab = self.pool.checkout_slab()  # leak: a new best overwrites the older slab without checking it in
        if slab is None:
            return float("-inf")
        self._fill(slab, prompt)
        if self.best is not None and slab.reward <= self.best.reward:
            self.pool.checkin_slab(slab)
            return self.best.reward
        self.best = slab
        return slab.reward

    def keep_for_task(self, task: str, prompt: List[int]) -> None:
        slab = self.pool.checkout_slab()  # clean: near miss, the displaced slab is checked in
        if slab is None:
            return
        self._fill(slab, prompt)
        displaced = self.by_task.get(task)
        self.by_task[task] = slab
        if displaced is not None:
            self.pool.checkin_slab(displaced)

    def minibatches(self, size: int) -> Iterator[List[Slab]]:
        order = list(self.episodes)
        random.shuffle(order)
        for i in range(0, len(order), size):
            yield order[i:i + size]

    def mean_length(self, prompts: List[List[int]]) -> float:
        slabs = [self.pool.checkout_slab() for _ in prompts]  # clean: near miss, Nones are filtered, the rest checked in
        total = 0
        for slab, p in zip(slabs, prompts):
            if slab is not None:
                self._fill(slab, p)
                total += slab.used
                self.pool.checkin_slab(slab)
        return total / max(1, len(prompts))

    def evaluate(self, prompts: List[List[int]]) -> float:
        slabs = [s for s in (self.pool.checkout_slab() for _ in prompts) if s]  # leak: only the rewarded slabs are checked in
        for slab, p in zip(slabs, prompts):
            self._fill(slab, p)
        good = [s for s in slabs if s.reward > 0]
        for s in good:
            self.pool.checkin_slab(s)
        return len(good) / max(1, len(slabs))

    def peek_reward(self, prompt: List[int]) -> float:
        slab = self.pool.checkout_slab()  # leak: the reward is returned, the slab is not checked in
        if slab is None:
            return 0.0
        self._fill(slab, prompt)
        logger.debug("reward %.3f", slab.reward)
        return slab.reward

    def clear(self) -> None:
        for slab in self.episodes:
            self.pool.checkin_slab(slab)
        self.episodes.clear()
        for slab in self.by_task.values():
            self.pool.checkin_slab(slab)
        self.by_task.clear()
        if self.best is not None:
            self.pool.checkin_slab(self.best)
            self.best = None
