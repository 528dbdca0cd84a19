"""GPU cache of expert weights for offloaded mixture-of-experts models."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn

logger = logging.getLogger(__name__)


@dataclass
class CacheStats:
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class ExpertSlots:
    """Intrusive free list over an index tensor."""

    def __init__(self, n: int) -> None:
        self._next = list(range(1, n)) + [-1]
        self._head = 0 if n else -1

    def pop_slot(self) -> int:
        slot = self._head
        if slot >= 0:
            self._head = self._next[slot]
        return slot

    def push_slot(self, slot: int) -> None:
        self._next[slot] = self._head
        self._head = slot


class ExpertCache:
    def __init__(self, slots: ExpertSlots, host: dict[tuple[int, int], torch.Tensor], gpu: torch.Tensor) -> None:
        self.slots = slots
        self.host = host
        self.gpu = gpu
        self.where: dict[tuple[int, int], int] = {}
        self.order: list[tuple[int, int]] = []
        self.stats = CacheStats()

    def _slot_or_evict(self) -> int:
        slot = self.slots.pop_slot()  # clean: handed to the caller
        while slot < 0:
            if not self.order:
                return -1
            self.evict(self.order[0])
            slot = self.slots.pop_slot()  # clean: handed to the caller
        return slot

    def fetch(self, layer: int, expert: int) -> Optional[torch.Tensor]:
        key = (layer, expert)
        if key in self.where:
            self.stats.hits += 1
            return self.gpu[self.where[key]]
        self.stats.misses += 1
        slot = self._slot_or_evict()  # clean: entered in where, evict() pushes it back
        if slot < 0:
            return None
        self.gpu[slot].copy_(self.host[key])
        self.where[key] = slot
        self.order.append(key)
        return self.gpu[slot]

    def evict(self, key: tuple[int, int]) -> None:
        slot = self.where.pop(key)
        self.order.remove(key)
        self.slots.push_slot(slot)
        self.stats.evictions += 1

    def evict_layer(self, layer: int) -> None:
        for key in [k for k in self.order if k[0] == layer]:
            self.evict(key)

    def prefetch(self, layer: int, experts: list[int], limit: int) -> int:
        done = 0
        for e in experts:
            slot = self.slots.pop_slot()  # leak: experts that are in the cache are skipped after the pop
            if slot < 0:
                break
            if (layer, e) in self.where:
                continue
            self.gpu[slot].copy_(self.host[(layer, e)])
            self.where[(layer, e)] = slot
            self.order.append((layer, e))
            done += 1
            if done >= limit:
                break
        return done

    def prefetch_missing(self, layer: int, experts: list[int]) -> int:
        done = 0
        for e in experts:
            if (layer, e) in self.where:
                continue
            slot = self.slots.pop_slot()  # clean: near miss, -1 is no slot, any other is entered
            if slot == -1:
                return done
            self.gpu[slot].copy_(self.host[(layer, e)])
            self.where[(layer, e)] = slot
            self.order.append((layer, e))
            done += 1
        return done


class OffloadedMoE(nn.Module):
    def __init__(self, layer: int, gate: nn.Linear, cache: ExpertCache, top_k: int = 2) -> None:
        super().__init__()
        self.layer = layer
        self.gate = gate
        self.cache = cache
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, idx = self.gate(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for e in idx.unique().tolist():
            weight = self.cache.fetch(self.layer, e)
            if weight is None:
                logger.warning("expert %d not available", e)
                continue
            sel = (idx == e)
            rows = sel.any(-1)
            out[rows] += (w * sel).sum(-1)[rows, None] * (x[rows] @ weight)
        return out

    def forward_bypass(self, x: torch.Tensor, e: int) -> torch.Tensor:
        """Uses an expert once, without caching it."""
        slot = self.cache.slots.pop_slot()  # clean: near miss, without a slot the host weight is used and there is nothing to push
        if slot < 0:
            return x @ self.cache.host[(self.layer, e)]
        self.cache.gpu[slot].copy_(self.cache.host[(self.layer, e)])
        y = x @ self.cache.gpu[slot]
        self.cache.slots.push_slot(slot)
        return y

    def calibrate(self, xs: list[torch.Tensor], e: int, tol: float) -> float:
        slot = self.cache.slots.pop_slot()  # leak: a large error returns at once and the slot is not pushed back
        if slot < 0:
            return float("inf")
        self.cache.gpu[slot].copy_(self.cache.host[(self.layer, e)])
        worst = 0.0
        for x in xs:
            err = float((x @ self.cache.gpu[slot] - x @ self.cache.host[(self.layer, e)]).abs().max())
            if err > tol:
                return err
            worst = max(worst, err)
        self.cache.slots.push_slot(slot)
        return worst

    def pin_shared(self, weights: list[torch.Tensor]) -> list[int]:
        slots = []
        for wt in weights:
            s = self.cache._slot_or_evict()  # leak: a missing slot raises and the list of the pinned ones is lost
            if s < 0:
                raise RuntimeError("cannot pin shared experts")
            self.cache.gpu[s].copy_(wt)
            slots.append(s)
        return slots
