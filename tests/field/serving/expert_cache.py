"""Weights of MoE experts in a few resident slots, with mixins for statistics and prefetch."""
from __future__ import annotations

import abc
import collections
import logging
from typing import Deque, Dict, Iterable, List, Optional

import torch

log = logging.getLogger(__name__)


class SlotAllocator:
    def __init__(self, n_slots: int, dim: int) -> None:
        self.weights = torch.zeros(n_slots, dim, dim)
        self._spare: Deque[int] = collections.deque(range(n_slots))

    def alloc_slot(self) -> Optional[int]:
        return self._spare.popleft() if self._spare else None

    def dealloc_slot(self, slot: int) -> None:
        self._spare.append(slot)


class BaseExpertCache(abc.ABC):
    def __init__(self, alloc: SlotAllocator) -> None:
        self.alloc = alloc
        self.resident: Dict[int, int] = {}

    @abc.abstractmethod
    def victim(self) -> int: ...

    def _place(self, expert: int) -> int:
        slot = self.alloc.alloc_slot()  # clean: handed to the caller, or taken over from the victim
        if slot is None:
            slot = self.resident.pop(self.victim())
        return slot

    def ensure(self, expert: int, weight: torch.Tensor) -> int:
        if expert not in self.resident:
            slot = self._place(expert)  # clean: in the resident table until clear
            self.alloc.weights[slot].copy_(weight)
            self.resident[expert] = slot
        return self.resident[expert]

    def clear(self) -> None:
        for slot in self.resident.values():
            self.alloc.dealloc_slot(slot)
        self.resident = {}


class StatsMixin:
    hits: int = 0
    misses: int = 0

    def note(self, hit: bool) -> None:
        if hit:
            self.hits += 1
        else:
            self.misses += 1


class FifoExpertCache(StatsMixin, BaseExpertCache):
    def victim(self) -> int:
        return next(iter(self.resident))

    def ensure(self, expert: int, weight: torch.Tensor) -> int:
        self.note(expert in self.resident)
        return super().ensure(expert, weight)


class PrefetchMixin:
    """Holds slots for experts that the router is likely to choose next."""

    alloc: SlotAllocator
    resident: Dict[int, int]

    def prefetch(self, experts: Iterable[int], weights: Dict[int, torch.Tensor]) -> int:
        n = 0
        for e in experts:
            slot = self.alloc.alloc_slot()  # leak: an expert without weights is skipped with the slot taken
            if slot is None:
                break
            if e in self.resident:
                self.alloc.dealloc_slot(slot)
                continue
            if e not in weights:
                log.debug("no weights for expert %d", e)
                continue
            self.alloc.weights[slot].copy_(weights[e])
            self.resident[e] = slot
            n += 1
        return n


class PrefetchingCache(PrefetchMixin, FifoExpertCache):
    def __init__(self, alloc: SlotAllocator, pinned: Iterable[int] = ()) -> None:
        super().__init__(alloc)
        self.shadow: Optional[int] = None
        self.pinned: List[int] = list(pinned)

    def load_shadow(self, weight: torch.Tensor) -> bool:
        if self.shadow is None:
            self.shadow = self.alloc.alloc_slot()  # clean: only when there is none, clear deallocates it
        if self.shadow is None:
            return False
        self.alloc.weights[self.shadow].copy_(weight)
        return True

    def promote_shadow(self, expert: int) -> bool:
        if self.shadow is None:
            return False
        old = self.resident.pop(expert, None)
        if old is not None:
            self.alloc.dealloc_slot(old)
        self.resident[expert], self.shadow = self.shadow, None
        return True

    def clear(self) -> None:
        super().clear()
        if self.shadow is not None:
            self.alloc.dealloc_slot(self.shadow)
            self.shadow = None


class ScratchCache(FifoExpertCache):
    def __init__(self, alloc: SlotAllocator) -> None:
        super().__init__(alloc)
        self.scratch = alloc.alloc_slot()  # leak: the overridden clear does not reach it

    def clear(self) -> None:
        super().clear()
        self.hits = self.misses = 0

    def mix(self, a: int, b: int) -> torch.Tensor:
        out = self.alloc.weights[self.scratch]
        torch.add(self.alloc.weights[self.resident[a]], self.alloc.weights[self.resident[b]], out=out)
        return out.clone()


class ExpertRunner:
    def __init__(self, cache: BaseExpertCache, top_k: int = 2) -> None:
        self.cache = cache
        self.top_k = top_k

    def apply(self, x: torch.Tensor, experts: List[int], weights: Dict[int, torch.Tensor]) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e in experts[: self.top_k]:
            slot = self.cache.ensure(e, weights[e])
            out += x @ self.cache.alloc.weights[slot]
        return out / self.top_k

    def apply_once(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        alloc = self.cache.alloc
        slot = alloc.alloc_slot()  # clean: near miss, deallocated when there is one
        if slot is None:
            return x @ weight
        alloc.weights[slot].copy_(weight)
        y = x @ alloc.weights[slot]
        alloc.dealloc_slot(slot)
        return y

    def apply_placed(self, x: torch.Tensor, expert: int, weight: torch.Tensor) -> torch.Tensor:
        slot = self.cache._place(expert)  # leak: neither made resident nor deallocated
        self.cache.alloc.weights[slot].copy_(weight)
        return x @ self.cache.alloc.weights[slot]

    def calibrate(self, xs: List[torch.Tensor]) -> float:
        alloc = self.cache.alloc
        slot = alloc.alloc_slot()  # leak: slot zero is false in the test before the dealloc
        best = 0.0
        for x in xs:
            best = max(best, float(x.abs().max()))
        if slot:
            alloc.dealloc_slot(slot)
        return best
