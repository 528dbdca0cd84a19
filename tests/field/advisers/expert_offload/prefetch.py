from __future__ import annotations

from collections import deque
from typing import Mapping

import torch

from .cache import ExpertCache, ExpertSlot


class CopyCredits:
    """Bounds the host-to-device copies in flight."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.out = 0

    def take(self) -> bool:
        if self.out >= self.n:
            return False
        self.out += 1
        return True

    def put(self, count: int = 1) -> None:
        self.out -= count


class Prefetcher:
    def __init__(self, cache: ExpertCache, host: Mapping[tuple[int, int], torch.Tensor], credits: CopyCredits) -> None:
        self.cache = cache
        self.host = host
        self.credits = credits
        self.inflight: deque[tuple[tuple[int, int], ExpertSlot]] = deque()

    def submit(self, layer: int, expert: int) -> bool:
        key = (layer, expert)
        if not self.credits.take():  # clean: near miss, put back when no slot is vacant, else upon drain or cancel
            return False
        slot = self.cache.take_vacant()  # leak: cancel clears inflight and puts the credits back, never the slots
        if slot is None:
            self.credits.put()
            return False
        slot.weight.copy_(self.host[key], non_blocking=True)
        self.inflight.append((key, slot))
        return True

    def drain(self) -> int:
        n = 0
        while self.inflight:
            (layer, expert), slot = self.inflight.popleft()
            self.cache.install(layer, expert, slot)
            self.credits.put()
            n += 1
        return n

    def cancel(self) -> None:
        self.credits.put(len(self.inflight))
        self.inflight.clear()

    def load_now(self, layer: int, expert: int) -> bool:
        weight = self.host.get((layer, expert))
        slot = self.cache.take_vacant()  # clean: near miss, returned as vacant for an unknown expert, else installed
        if slot is None:
            return False
        if weight is None:
            self.cache.return_vacant(slot)
            return False
        slot.weight.copy_(weight)
        self.cache.install(layer, expert, slot)
        return True

    def load_many(self, keys: list[tuple[int, int]]) -> int:
        loaded = 0
        for key in keys:
            if not self.credits.take():  # leak: the continue for an expert that cannot be loaded keeps the credit
                break
            if not self.load_now(*key):
                continue
            loaded += 1
            self.credits.put()
        return loaded
