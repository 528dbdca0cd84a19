from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable, Iterable

import torch


class NoFreeSlot(Exception):
    pass


class AdapterSlots:
    """GPU rows for LoRA adapters. A bitmap says which row is taken."""

    def __init__(self, n: int) -> None:
        self._bitmap = torch.zeros(n, dtype=torch.bool)

    def obtain(self) -> int:
        idle = (~self._bitmap).nonzero().flatten()
        if idle.numel() == 0:
            raise NoFreeSlot
        row = int(idle[0])
        self._bitmap[row] = True
        return row

    def recycle(self, row: int) -> None:
        self._bitmap[row] = False


@dataclass
class Adapter:
    name: str
    rank: int
    a: torch.Tensor
    b: torch.Tensor


class LoRAManager:
    def __init__(self, slots: AdapterSlots, max_rank: int, hidden: int, n: int) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self.a_stack = torch.zeros(n, max_rank, hidden)
        self.b_stack = torch.zeros(n, hidden, max_rank)
        self.active: OrderedDict[str, int] = OrderedDict()
        self.pinned: dict[str, int] = {}

    def activate(self, ad: Adapter) -> int:
        if ad.name in self.active:
            self.active.move_to_end(ad.name)
            return self.active[ad.name]
        try:
            row = self.slots.obtain()  # clean: put into the active table, evicted or removed from there
        except NoFreeSlot:
            self.evict_oldest()
            row = self.slots.obtain()  # clean: second try after eviction, goes into the table too
        self.active[ad.name] = row
        self.a_stack[row, : ad.rank].copy_(ad.a)
        self.b_stack[row, :, : ad.rank].copy_(ad.b)
        return row

    def activate_checked(self, ad: Adapter) -> int:
        row = self.slots.obtain()  # leak: the raise for the rank keeps the row taken
        if ad.rank > self.max_rank:
            raise ValueError(f"rank {ad.rank} of {ad.name} is above {self.max_rank}")
        self.remove(ad.name)
        self.active[ad.name] = row
        return row

    def activate_strict(self, ad: Adapter) -> int:
        if ad.name in self.active:
            raise KeyError(f"{ad.name} is active already")
        row = self.slots.obtain()  # clean: near miss, recycled before the raise
        if ad.a.shape[0] != ad.rank or ad.b.shape[-1] != ad.rank:
            self.slots.recycle(row)
            raise ValueError(f"shapes of {ad.name} disagree with its rank")
        self.active[ad.name] = row
        return row

    def pin_adapter(self, ad: Adapter) -> None:
        self.pinned[ad.name] = self.slots.obtain()  # leak: a second pin of the same name overwrites the row held

    def preload(self, adapters: Iterable[Adapter], keep: Callable[[Adapter], bool]) -> int:
        loaded = 0
        for ad in adapters:
            if not keep(ad):
                continue
            if ad.name in self.active:
                continue
            self.active[ad.name] = self.slots.obtain()  # clean: near miss, the name is known to be absent
            loaded += 1
        return loaded

    def evict_oldest(self) -> None:
        _, row = self.active.popitem(last=False)
        self.a_stack[row].zero_()
        self.slots.recycle(row)

    def remove(self, name: str) -> bool:
        row = self.active.pop(name, None)
        if row is None:
            return False
        self.slots.recycle(row)
        return True

    def unpin_all(self) -> None:
        for row in self.pinned.values():
            self.slots.recycle(row)
        self.pinned.clear()

    def warmup(self, ranks: list[int]) -> None:
        for rank in ranks:
            row = self.slots.obtain()  # leak: a rank above the maximum skips the recycle
            self.a_stack[row].normal_()
            if rank > self.max_rank:
                continue
            self.b_stack[row, :, :rank].normal_()
            self.slots.recycle(row)

    def benchmark(self, ranks: list[int]) -> list[float]:
        out: list[float] = []
        row = self.slots.obtain()  # clean: near miss, the loop is left by break and the finally recycles
        try:
            for rank in ranks:
                if rank > self.max_rank:
                    break
                out.append(float(self.a_stack[row, :rank].sum()))
        finally:
            self.slots.recycle(row)
        return out

    def swap(self, old: str, ad: Adapter) -> int:
        self.remove(ad.name)
        row = self.active.pop(old)
        if ad.rank <= self.max_rank:
            self.active[ad.name] = row
            return row
        self.slots.recycle(row)
        return -1

    def merge(self, first: str, second: str) -> int:
        target = self.slots.obtain()  # leak: lost on the exit for the unknown adapter
        if first not in self.active or second not in self.active:
            return -1
        self.a_stack[target] = self.a_stack[self.active[first]] + self.a_stack[self.active[second]]
        merged = f"{first}+{second}"
        self.remove(merged)
        self.active[merged] = target
        return target
