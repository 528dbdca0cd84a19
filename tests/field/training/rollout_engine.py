"""Rollout generation for RLHF: paged KV blocks are allocated per trajectory."""
from __future__ import annotations

import collections
import logging
import random
from dataclasses import dataclass, field
from typing import Callable, Deque, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self.free_ids: Deque[int] = collections.deque(range(num_blocks))

    @property
    def available(self) -> int:
        return len(self.free_ids)

    def allocate_blocks(self, n: int) -> Optional[List[int]]:
        if n > len(self.free_ids):
            return None
        return [self.free_ids.popleft() for _ in range(n)]

    def free_blocks(self, blocks: List[int]) -> None:
        self.free_ids.extend(blocks)


@dataclass
class Trajectory:
    prompt: List[int]
    tokens: List[int] = field(default_factory=list)
    blocks: List[int] = field(default_factory=list)
    draft: List[int] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False

    def blocks_needed(self, size: int) -> int:
        return -(-(len(self.prompt) + len(self.tokens) + 1) // size)


class RolloutEngine:
    def __init__(self, mgr: BlockManager, policy: Callable[[List[int]], int], max_new: int = 32, eos: int = 2) -> None:
        self.mgr = mgr
        self.policy = policy
        self.max_new = max_new
        self.eos = eos
        self.running: List[Trajectory] = []
        self.waiting: Deque[Trajectory] = collections.deque()
        self.prefix: Dict[int, List[int]] = {}

    def admit(self) -> int:
        n = 0
        while self.waiting:
            traj = self.waiting[0]
            blocks = self.mgr.allocate_blocks(traj.blocks_needed(self.mgr.block_size))  # clean: live on the trajectory, retire() frees them
            if blocks is None:
                break
            self.waiting.popleft()
            traj.blocks = blocks
            self.running.append(traj)
            n += 1
        return n

    def admit_limited(self, limit: int) -> int:
        n = 0
        while self.waiting:
            traj = self.waiting.popleft()
            blocks = self.mgr.allocate_blocks(traj.blocks_needed(self.mgr.block_size))  # leak: past the limit the trajectory is queued again without its blocks
            if blocks is None:
                self.waiting.appendleft(traj)
                break
            if n >= limit:
                self.waiting.appendleft(traj)
                break
            traj.blocks = blocks
            self.running.append(traj)
            n += 1
        return n

    def grow(self, traj: Trajectory) -> bool:
        need = traj.blocks_needed(self.mgr.block_size) - len(traj.blocks)
        if need <= 0:
            return True
        more = self.mgr.allocate_blocks(need)  # clean: joins the trajectory's list
        if more is None:
            return False
        traj.blocks.extend(more)
        return True

    def start_draft(self, traj: Trajectory) -> bool:
        fresh = self.mgr.allocate_blocks(1)  # leak: every step overwrites the draft of the step before
        if fresh is None:
            return False
        traj.draft = fresh
        return True

    def step(self) -> None:
        for traj in list(self.running):
            self.start_draft(traj)
            tok = self.policy(traj.prompt + traj.tokens)
            traj.tokens.append(tok)
            if tok == self.eos or len(traj.tokens) >= self.max_new:
                traj.done = True
                self.retire(traj)
            elif not self.grow(traj):
                self.preempt(traj)

    def retire(self, traj: Trajectory) -> None:
        self.running.remove(traj)
        self.mgr.free_blocks(traj.blocks)
        self.mgr.free_blocks(traj.draft)
        traj.blocks = []
        traj.draft = []

    def preempt(self, traj: Trajectory) -> None:
        self.retire(traj)
        traj.tokens.clear()
        self.waiting.append(traj)

    def share_prefix(self, key: int, n_tokens: int) -> bool:
        if key in self.prefix:
            return True
        blocks = self.mgr.allocate_blocks(-(-n_tokens // self.mgr.block_size))  # clean: drop_prefix and drop_prefixes free them
        if blocks is None:
            return False
        self.prefix[key] = blocks
        return True

    def drop_prefix(self, key: int) -> None:
        self.mgr.free_blocks(self.prefix.pop(key, []))

    def drop_prefixes(self) -> None:
        for key in list(self.prefix):
            self.drop_prefix(key)

    def score_prompt(self, prompt: List[int]) -> Optional[float]:
        blocks = self.mgr.allocate_blocks(len(prompt) // self.mgr.block_size + 1)  # leak: an empty prompt returns before the free
        if not blocks:
            return None
        if not prompt:
            return 0.0
        value = float(self.policy(prompt))
        self.mgr.free_blocks(blocks)
        return value

    def beam(self, prompt: List[int], width: int) -> Optional[List[int]]:
        per = len(prompt) // self.mgr.block_size + 1
        beams: List[List[int]] = []
        for _ in range(width):
            blocks = self.mgr.allocate_blocks(per)  # clean: near miss, the for-else and the shortage both free all beams
            if blocks is None:
                break
            beams.append(blocks)
        else:
            best = [self.policy(prompt) for _ in beams]
            for b in beams:
                self.mgr.free_blocks(b)
            return best
        for b in beams:
            self.mgr.free_blocks(b)
        return None

    def sample_group(self, prompt: List[int], n: int) -> List[Trajectory]:
        group = []
        for _ in range(n):
            blocks = self.mgr.allocate_blocks(1)  # clean: each trajectory owns its list, the caller frees
            if blocks is None:
                break
            group.append(Trajectory(prompt, blocks=blocks))
        return group


def best_of(engine: RolloutEngine, prompt: List[int], n: int) -> Optional[Trajectory]:
    group = engine.sample_group(prompt, n)  # leak: only the winner's blocks are freed
    if not group:
        return None
    for t in group:
        t.reward = random.random()
    best = max(group, key=lambda t: t.reward)
    engine.mgr.free_blocks(best.blocks)
    return best


def mean_reward(engine: RolloutEngine, prompt: List[int], n: int) -> float:
    group = engine.sample_group(prompt, n)  # clean: all freed
    for t in group:
        t.reward = random.random()
    rewards = torch.tensor([t.reward for t in group] or [0.0])
    for t in group:
        engine.mgr.free_blocks(t.blocks)
    return float(rewards.mean())
