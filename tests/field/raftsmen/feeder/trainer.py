"""The training loop's side."""
from __future__ import annotations

import math
from typing import Callable, List

import torch

from .collate import collate_filtered, split_lengths
from .prefetch import Prefetcher


class Trainer:
    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], feed: Prefetcher, optim: torch.optim.Optimizer) -> None:
        self.model = model
        self.feed = feed
        self.optim = optim
        self.skipped = 0

    def fit(self, steps: int) -> int:
        for k in range(steps):
            t = self.feed.next()  # leak: a loss that is not finite continues without settle()
            if t is None:
                return k
            loss = self.model(t.tokens[: t.rows])
            if not math.isfinite(loss.item()):
                self.skipped += 1
                continue
            loss.backward()
            self.optim.step()
            self.optim.zero_grad(set_to_none=True)
            t.settle()
        return steps

    @torch.no_grad()
    def evaluate(self, batches: int) -> float:
        total, n = 0.0, 0
        while n < batches:
            t = self.feed.next()  # clean: None ends the loop and the rest is settled on every turn
            if t is None:
                break
            if t.rows:
                total += self.model(t.tokens[: t.rows]).item()
            n += 1
            t.settle()
        return total / max(n, 1)

    def fit_filtered(self, docs: List[List[List[int]]], pad: int) -> int:
        used = 0
        for d in docs:
            t = collate_filtered(self.feed.ring, d, pad, min_rows=4)  # clean: settled in finally
            if t is None:
                continue
            try:
                self.model(t.tokens[: t.rows]).backward()
            finally:
                t.settle()
            used += 1
        self.optim.step()
        return used

    def fit_split(self, docs: List[List[int]], pad: int) -> float:
        tickets = split_lengths(self.feed.ring, docs, pad, edge=2048)  # leak: only the first ticket of the list is settled
        if not tickets:
            return 0.0
        loss = sum(self.model(t.tokens[: t.rows]) for t in tickets)
        loss.backward()
        tickets[0].settle()
        return loss.item()
