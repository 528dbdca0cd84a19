"""Encoder cache for multimodal inputs. Budget is counted in embedding tokens."""
from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MMInput:
    mm_hash: str
    num_tokens: int


class TokenBudget:
    """Counter with a hard upper bound."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    def reserve(self, n: int) -> bool:
        if self.used + n > self.total:
            return False
        self.used += n
        return True

    def unreserve(self, n: int) -> None:
        assert n <= self.used
        self.used -= n


class EncoderCache:
    def __init__(self, budget: TokenBudget, encoder: torch.nn.Module) -> None:
        self.budget = budget
        self.encoder = encoder
        self.entries: OrderedDict[str, tuple[int, torch.Tensor]] = OrderedDict()

    def get_or_encode(self, item: MMInput, pixels: torch.Tensor) -> torch.Tensor | None:
        hit = self.entries.get(item.mm_hash)
        if hit is not None:
            return hit[1]
        if not self.budget.reserve(item.num_tokens):  # clean: entered in the cache, evict() gives it back
            return None
        emb = self.encoder(pixels)
        self.entries[item.mm_hash] = (item.num_tokens, emb)
        return emb

    def encode_checked(self, item: MMInput, pixels: torch.Tensor) -> torch.Tensor | None:
        if item.mm_hash in self.entries:
            return self.entries[item.mm_hash][1]
        if not self.budget.reserve(item.num_tokens):  # leak: a wrong embedding length returns None with the budget used
            return None
        emb = self.encoder(pixels)
        if emb.shape[0] != item.num_tokens:
            logger.error("expected %d embeddings, got %d", item.num_tokens, emb.shape[0])
            return None
        self.entries[item.mm_hash] = (item.num_tokens, emb)
        return emb

    def encode_batch(self, items: list[MMInput], pixels: list[torch.Tensor]) -> list[torch.Tensor]:
        total = sum(i.num_tokens for i in items)
        if not self.budget.reserve(total):  # clean: near miss, the entries add up to what was reserved
            return []
        outs = []
        for item, px in zip(items, pixels, strict=True):
            if item.mm_hash in self.entries:
                self.budget.unreserve(item.num_tokens)
                outs.append(self.entries[item.mm_hash][1])
                continue
            emb = self.encoder(px)
            self.entries[item.mm_hash] = (item.num_tokens, emb)
            outs.append(emb)
        return outs

    def encode_transient(self, item: MMInput, pixels: torch.Tensor) -> torch.Tensor | None:
        if not self.budget.reserve(item.num_tokens):  # clean: given back after the copy to the host
            return None
        emb = self.encoder(pixels).cpu()
        self.budget.unreserve(item.num_tokens)
        return emb

    def encode_or_evict(self, item: MMInput, pixels: torch.Tensor) -> torch.Tensor:
        while not self.budget.reserve(item.num_tokens):  # clean: near miss, the loop ends with exactly one success
            if not self.entries:
                raise MemoryError("item larger than the encoder budget")
            self.evict_one()
        emb = self.encoder(pixels)
        stale = self.entries.pop(item.mm_hash, None)
        if stale is not None:
            self.budget.unreserve(stale[0])
        self.entries[item.mm_hash] = (item.num_tokens, emb)
        return emb

    def can_schedule(self, items: list[MMInput]) -> bool:
        for item in items:
            if item.mm_hash in self.entries:
                continue
            if not self.budget.reserve(item.num_tokens):  # leak: the question itself uses up the budget
                return False
        return True

    def evict_one(self) -> int:
        _, (n, _emb) = self.entries.popitem(last=False)
        self.budget.unreserve(n)
        return n

    def reset(self) -> None:
        while self.entries:
            self.evict_one()


class Prefetch:
    """Holds budget until the object is closed or collected."""

    def __init__(self, budget: TokenBudget, n: int) -> None:
        if not budget.reserve(n):  # clean: the finalizer gives it back
            raise MemoryError("no budget for prefetch")
        self._fin = weakref.finalize(self, budget.unreserve, n)

    def close(self) -> None:
        self._fin()


class PrefetchPlan:
    def __init__(self, budget: TokenBudget) -> None:
        self.budget = budget
        self.sizes: list[int] = []

    def add(self, n: int) -> bool:
        if not self.budget.reserve(n):  # leak: clear() empties the list without giving anything back
            return False
        self.sizes.append(n)
        return True

    def run(self) -> int:
        done = 0
        for n in self.sizes:
            self.budget.unreserve(n)
            done += n
        self.sizes = []
        return done

    def clear(self) -> None:
        self.sizes.clear()
