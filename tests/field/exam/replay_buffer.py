"""Replay storage for off-policy RL: episodes live in recycled arrays."""
import random
from typing import Dict, List, Optional, Tuple

import torch


class EpisodeStore:
    """Fixed set of episode arrays; `new_episode` hands one out, `recycle` takes it back."""

    def __init__(self, episodes: int, horizon: int, obs: int):
        self.obs = torch.zeros(episodes, horizon, obs)
        self.rew = torch.zeros(episodes, horizon)
        self.len = [0] * episodes
        self._stack = list(range(episodes))
        self.horizon = horizon

    def new_episode(self) -> int:
        if not self._stack:
            raise IndexError("replay store exhausted")
        ep = self._stack.pop()  # clean: goes to the caller
        self.len[ep] = 0
        return ep

    def recycle(self, ep: int) -> None:
        self._stack.append(ep)

    def add(self, ep: int, obs: torch.Tensor, rew: float) -> bool:
        t = self.len[ep]
        if t >= self.horizon:
            return False
        self.obs[ep, t] = obs
        self.rew[ep, t] = rew
        self.len[ep] = t + 1
        return True


class Collector:
    def __init__(self, store: EpisodeStore, env, keep: int = 64):
        self.store, self.env, self.keep = store, env, keep
        self.finished: List[int] = []
        self.best: Optional[int] = None
        self.best_ret = float("-inf")

    def collect(self, policy) -> float:
        ep = self.store.new_episode()  # clean: finished keeps it, evict recycles
        obs, done, ret = self.env.reset(), False, 0.0
        while not done:
            obs, r, done = self.env.step(policy(obs))
            ret += r
            if not self.store.add(ep, obs, r):
                break
        self.finished.append(ep)
        self.evict()
        return ret

    def evict(self) -> None:
        while len(self.finished) > self.keep:
            self.store.recycle(self.finished.pop(0))

    def clear(self) -> None:
        for ep in self.finished:
            self.store.recycle(ep)
        self.finished.clear()

    def collect_min(self, policy, min_ret: float) -> bool:
        ep = self.store.new_episode()  # leak: a poor episode is neither kept nor recycled
        obs, done, ret = self.env.reset(), False, 0.0
        while not done:
            obs, r, done = self.env.step(policy(obs))
            ret += r
            if not self.store.add(ep, obs, r):
                break
        if ret < min_ret:
            return False
        self.finished.append(ep)
        return True

    def collect_good(self, policy, min_ret: float) -> bool:
        ep = self.store.new_episode()  # clean: near miss, a poor one is recycled, a good one is kept
        obs, done, ret = self.env.reset(), False, 0.0
        while not done:
            obs, r, done = self.env.step(policy(obs))
            ret += r
            if not self.store.add(ep, obs, r):
                break
        good = ret >= min_ret
        (self.finished.append if good else self.store.recycle)(ep)
        return good

    def collect_best(self, policy) -> None:
        ep = self.store.new_episode()  # leak: the former best is overwritten without recycle
        obs, done, ret = self.env.reset(), False, 0.0
        while not done:
            obs, r, done = self.env.step(policy(obs))
            ret += r
            if not self.store.add(ep, obs, r):
                break
        if ret > self.best_ret:
            self.best, self.best_ret = ep, ret
        else:
            self.store.recycle(ep)

    def drop_best(self) -> None:
        if self.best is not None:
            self.store.recycle(self.best)
            self.best = None
            self.best_ret = float("-inf")

    def bootstrap(self, n: int) -> List[int]:
        eps = []
        try:
            for _ in range(n):
                eps.append(self.store.new_episode())  # clean: near miss, the handler recycles the partial list
        except IndexError:
            for ep in eps:
                self.store.recycle(ep)
            return []
        return eps

    def bootstrap_soft(self, n: int) -> List[int]:
        eps = []
        try:
            for _ in range(n):
                eps.append(self.store.new_episode())  # leak: the handler returns [] and forgets the partial list
        except IndexError:
            return []
        return eps

    def fill(self, n: int) -> int:
        eps = self.bootstrap(n)  # clean: moved into finished
        for ep in eps:
            self.store.add(ep, torch.zeros(self.store.obs.shape[-1]), 0.0)
        self.finished += eps
        return len(eps)

    def fill_sample(self, n: int, k: int) -> int:
        eps = self.bootstrap(n)  # leak: only the sampled ones are kept, the rest is lost
        chosen = random.sample(eps, min(k, len(eps)))
        self.finished.extend(chosen)
        return len(chosen)

    def fill_split(self, n: int) -> Tuple[int, int]:
        eps = self.bootstrap(n)  # clean: near miss, both halves are accounted for
        half = len(eps) // 2
        self.finished.extend(eps[:half])
        for ep in eps[half:]:
            self.store.recycle(ep)
        return half, len(eps) - half


def returns(store: EpisodeStore, eps: List[int]) -> Dict[int, float]:
    return {ep: float(store.rew[ep, : store.len[ep]].sum()) for ep in eps}


def rollout_return(store: EpisodeStore, env, policy) -> float:
    ep = store.new_episode()  # clean: recycled in finally
    try:
        obs, done = env.reset(), False
        while not done:
            obs, r, done = env.step(policy(obs))
            if not store.add(ep, obs, r):
                break
        return returns(store, [ep])[ep]
    finally:
        store.recycle(ep)


def rollout_length(store: EpisodeStore, env, policy) -> int:
    ep = store.new_episode()  # leak: a horizon overflow returns -1 without recycle
    obs, done = env.reset(), False
    while not done:
        obs, r, done = env.step(policy(obs))
        if not store.add(ep, obs, r):
            return -1
    n = store.len[ep]
    store.recycle(ep)
    return n
