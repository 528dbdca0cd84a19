"""Experience collection for PPO: rollouts are packed in preallocated experience pages."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)


class Policy(Protocol):
    def generate(self, prompts: torch.Tensor) -> torch.Tensor: ...
    def logprobs(self, tokens: torch.Tensor) -> torch.Tensor: ...


@dataclass
class ExperiencePage:
    index: int
    tokens: torch.Tensor
    logprobs: torch.Tensor
    rewards: torch.Tensor


class PageStore:
    def __init__(self, pages: int, batch: int, seq: int) -> None:
        self._pages = [
            ExperiencePage(
                i,
                torch.zeros(batch, seq, dtype=torch.long),
                torch.zeros(batch, seq),
                torch.zeros(batch),
            )
            for i in range(pages)
        ]
        self._avail = set(range(pages))

    def get_page(self) -> ExperiencePage:
        if not self._avail:
            raise RuntimeError("experience store is full")
        return self._pages[self._avail.pop()]

    def put_page(self, page: ExperiencePage) -> None:
        page.rewards.zero_()
        self._avail.add(page.index)


class RolloutWorker:
    def __init__(self, policy: Policy, store: PageStore, reward_fn, kl_cap: float | None = None) -> None:
        self.policy = policy
        self.store = store
        self.reward_fn = reward_fn
        self.kl_cap = kl_cap
        self.ready: list[ExperiencePage] = []
        self.stale: list[ExperiencePage] = []

    def collect(self, prompts: torch.Tensor) -> None:
        page = self.store.get_page()  # clean: appended to ready, which train() and discard() give back
        tokens = self.policy.generate(prompts)
        page.tokens[:, : tokens.shape[1]] = tokens
        page.logprobs.copy_(self.policy.logprobs(page.tokens))
        page.rewards.copy_(self.reward_fn(tokens))
        self.ready.append(page)

    def collect_filtered(self, prompts: torch.Tensor, floor: float) -> bool:
        page = self.store.get_page()  # leak: rollouts under the reward floor return False with the page out
        tokens = self.policy.generate(prompts)
        page.tokens[:, : tokens.shape[1]] = tokens
        page.rewards.copy_(self.reward_fn(tokens))
        if page.rewards.mean() < floor:
            return False
        self.ready.append(page)
        return True

    def collect_kl(self, prompts: torch.Tensor, ref: Policy) -> ExperiencePage | None:
        page = self.store.get_page()  # clean: near miss, rejected page is put back, the other is returned
        page.tokens.copy_(self.policy.generate(prompts))
        kl = (self.policy.logprobs(page.tokens) - ref.logprobs(page.tokens)).mean()
        if self.kl_cap is not None and kl > self.kl_cap:
            self.store.put_page(page)
            return None
        return page

    def best_of(self, prompts: torch.Tensor, ref: Policy, n: int) -> ExperiencePage | None:
        best: ExperiencePage | None = None
        for _ in range(n):
            cand = self.collect_kl(prompts, ref)  # leak: the weaker candidate, or the former best, is forgotten
            if cand is None:
                continue
            if best is None or cand.rewards.sum() > best.rewards.sum():
                best = cand
        return best

    def best_of_ranked(self, prompts: torch.Tensor, ref: Policy, n: int) -> ExperiencePage | None:
        best: ExperiencePage | None = None
        for _ in range(n):
            cand = self.collect_kl(prompts, ref)  # clean: near miss, the loser of every comparison is put back
            if cand is None:
                continue
            if best is None:
                best = cand
                continue
            loser, best = (best, cand) if cand.rewards.sum() > best.rewards.sum() else (cand, best)
            self.store.put_page(loser)
        return best

    def train(self, step_fn) -> float:
        total = 0.0
        while self.ready:
            page = self.ready.pop()
            total += float(step_fn(page))
            self.store.put_page(page)
        return total

    def discard(self) -> None:
        for page in self.ready:
            self.store.put_page(page)
        self.ready = []

    def collect_stale(self, replay: torch.Tensor) -> None:
        page = self.store.get_page()  # leak: kept in stale, which rotate() clears without putting pages back
        page.tokens.copy_(replay)
        self.stale.append(page)

    def rotate(self) -> int:
        n = len(self.stale)
        self.stale.clear()
        logger.info("rotated %d stale pages", n)
        return n


class AdvantageEstimator:
    def __init__(self, store: PageStore, gamma: float = 0.99) -> None:
        self.store = store
        self.gamma = gamma

    def returns(self, page: ExperiencePage) -> torch.Tensor:
        scratch = self.store.get_page()  # leak: logprobs is kept as result, the page itself is never put back
        acc = scratch.logprobs
        acc.copy_(page.logprobs)
        for t in range(acc.shape[1] - 2, -1, -1):
            acc[:, t] += self.gamma * acc[:, t + 1]
        return F.normalize(acc.clone(), dim=-1)

    def whiten(self, page: ExperiencePage) -> dict[str, Any]:
        scratch = self.store.get_page()  # clean: put back before the statistics are returned
        scratch.rewards.copy_(page.rewards)
        stats = {"mean": float(scratch.rewards.mean()), "std": float(scratch.rewards.std())}
        self.store.put_page(scratch)
        return stats


def evaluate(worker: RolloutWorker, prompts: torch.Tensor, ref: Policy) -> float:
    page = worker.collect_kl(prompts, ref)  # clean: None or put back
    if page is None:
        return float("-inf")
    score = float(page.rewards.mean())
    worker.store.put_page(page)
    return score


def smoke_test(worker: RolloutWorker, prompts: torch.Tensor, ref: Policy) -> bool:
    return worker.collect_kl(prompts, ref) is not None  # leak: only compared with None, page dropped
