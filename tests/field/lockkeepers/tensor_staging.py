"""Staging buffers for observations and advantages on their way to the learner."""
from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

import torch

log = logging.getLogger("learner.staging")

Shape = Tuple[int, ...]


class StagingPool:
    """Pinned host tensors by shape. get_buffer() takes one, put_buffer() puts it back."""

    def __init__(self, max_per_shape: int) -> None:
        self._spare: Dict[Shape, List[torch.Tensor]] = defaultdict(list)
        self._made: Dict[Shape, int] = defaultdict(int)
        self._max = max_per_shape
        self._lock = threading.Lock()

    def get_buffer(self, shape: Shape) -> Optional[torch.Tensor]:
        with self._lock:
            if self._spare[shape]:
                return self._spare[shape].pop()
            if self._made[shape] >= self._max:
                return None
            self._made[shape] += 1
        return torch.empty(shape, pin_memory=True)

    def must_get(self, shape: Shape) -> torch.Tensor:
        buf = self.get_buffer(shape)  # clean: None raises, else handed to the caller
        if buf is None:
            raise RuntimeError(f"no staging buffer of shape {shape}")
        return buf

    def put_buffer(self, buf: torch.Tensor) -> None:
        with self._lock:
            self._spare[tuple(buf.shape)].append(buf)


def stage_rewards(pool: StagingPool, rewards: list) -> torch.Tensor:
    """Answers a pooled tensor; put it back."""
    buf = pool.must_get((len(rewards),))  # clean: handed to the caller
    for i, value in enumerate(rewards):
        buf[i] = value
    return buf


def discounted(pool: StagingPool, rewards: list, gamma: float) -> torch.Tensor:
    staged = stage_rewards(pool, rewards)  # leak: cloned, and the pooled tensor is dropped
    out = staged.clone()
    for i in range(len(rewards) - 2, -1, -1):
        out[i] = out[i] + gamma * out[i + 1]
    return out


def normalised(pool: StagingPool, rewards: list) -> torch.Tensor:
    staged = stage_rewards(pool, rewards)  # clean: near miss, the answer is a new tensor and this goes back
    out = (staged - staged.mean()) / (staged.std() + 1e-6)
    pool.put_buffer(staged)
    return out


def reward_stats(pool: StagingPool, rewards: list) -> dict:
    return {
        "mean": sum(rewards) / max(1, len(rewards)),
        "max": float(stage_rewards(pool, rewards).max()),  # leak: the pooled tensor is a temporary
    }


def gae(pool: StagingPool, rewards: list, values: list, gamma: float, lam: float) -> Optional[torch.Tensor]:
    """Pooled answer."""
    if len(values) != len(rewards) + 1:
        return None
    adv = pool.must_get((len(rewards),))  # clean: handed to the caller
    deltas = pool.must_get((len(rewards),))  # clean: put back before the return
    running = 0.0
    for i in reversed(range(len(rewards))):
        deltas[i] = rewards[i] + gamma * values[i + 1] - values[i]
        running = float(deltas[i]) + gamma * lam * running
        adv[i] = running
    pool.put_buffer(deltas)
    return adv


def advantage_step(pool: StagingPool, rewards: list, values: list, apply: Callable) -> bool:
    adv = gae(pool, rewards, values, 0.99, 0.95)  # clean: put back after use, None has nothing
    if adv is None:
        log.warning("values do not match the rewards")
        return False
    apply(adv)
    pool.put_buffer(adv)
    return True


def advantage_sign(pool: StagingPool, rewards: list, values: list) -> float:
    adv = gae(pool, rewards, values, 0.99, 0.95)  # leak: a constant advantage returns before put_buffer
    if adv is None:
        return 0.0
    spread = float(adv.max() - adv.min())
    if spread < 1e-8:
        return 0.0
    share = float((adv > 0).float().mean())
    pool.put_buffer(adv)
    return share


def vtrace(pool: StagingPool, log_rhos: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    rho = pool.must_get(tuple(log_rhos.shape))  # leak: the name is bound to a new tensor before put_buffer
    rho.copy_(log_rhos)
    rho = torch.clamp(rho.exp(), max=1.0)
    out = rho * deltas
    if rho.is_pinned():
        pool.put_buffer(rho)
    return out


@dataclass
class Minibatch:
    obs: torch.Tensor
    act: torch.Tensor
    mask: Optional[torch.Tensor] = None

    def recycle(self, pool: StagingPool) -> None:
        pool.put_buffer(self.obs)
        pool.put_buffer(self.act)
        if self.mask is not None:
            pool.put_buffer(self.mask)


@dataclass
class SequenceBatch:
    obs: torch.Tensor
    act: torch.Tensor
    carry: Optional[torch.Tensor] = None

    def recycle(self, pool: StagingPool) -> None:
        pool.put_buffer(self.obs)
        pool.put_buffer(self.act)
        self.carry = None


def make_minibatch(pool: StagingPool, n: int, width: int, masked: bool) -> Minibatch:
    obs = pool.must_get((n, width))  # clean: the minibatch recycles it
    act = pool.must_get((n,))  # clean: the minibatch recycles it
    mask = None
    if masked:
        mask = pool.must_get((n, 1))  # clean: near miss, recycle() puts it back when it is not None
        mask.fill_(1)
    return Minibatch(obs, act, mask)


def make_sequences(pool: StagingPool, n: int, width: int) -> SequenceBatch:
    obs = pool.must_get((n, width))  # clean: the batch recycles it
    act = pool.must_get((n,))  # clean: the batch recycles it
    carry = pool.must_get((n, 512))  # leak: recycle() sets the field to None and puts only two back
    carry.zero_()
    return SequenceBatch(obs, act, carry)


def train_minibatch(pool: StagingPool, loader: Callable, update: Callable) -> float:
    batch = make_minibatch(pool, 256, 64, masked=True)  # clean: recycled at the end
    loader(batch.obs, batch.act)
    loss = update(batch)
    batch.recycle(pool)
    return loss
