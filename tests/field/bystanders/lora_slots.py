"""LoRA adapter slots on the worker."""
import logging
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Set

import torch

logger = logging.getLogger(__name__)


class AdapterSlots:
    """Rows of the stacked A/B matrices; a bitmap says which are used."""

    def __init__(self, max_loras: int, rank: int, dim: int):
        self.lora_a = torch.zeros(max_loras, rank, dim)
        self.lora_b = torch.zeros(max_loras, dim, rank)
        self._used = torch.zeros(max_loras, dtype=torch.bool)

    def reserve(self) -> int:
        idle = (~self._used).nonzero()
        if idle.numel() == 0:
            return -1
        row = int(idle[0])
        self._used[row] = True
        return row

    def unreserve(self, row: int) -> None:
        self.lora_a[row].zero_()
        self.lora_b[row].zero_()
        self._used[row] = False


@dataclass
class Adapter:
    name: str
    rank: int
    a: torch.Tensor
    b: torch.Tensor


class AdapterManager:
    def __init__(self, slots: AdapterSlots, max_rank: int = 64):
        self.slots = slots
        self.max_rank = max_rank
        self.active: Dict[str, int] = {}
        self.staged: Dict[str, int] = {}
        self.blocked: Set[str] = set()

    def _write(self, row: int, ad: Adapter) -> None:
        self.slots.lora_a[row, : ad.rank].copy_(ad.a)
        self.slots.lora_b[row, :, : ad.rank].copy_(ad.b)

    def load(self, ad: Adapter) -> Optional[int]:
        if ad.name in self.active:
            return self.active[ad.name]
        row = self.slots.reserve()  # clean: recorded in active, unload frees it
        if row < 0:
            return None
        self._write(row, ad)
        self.active[ad.name] = row
        return row

    def load_strict(self, ad: Adapter) -> int:
        if ad.name in self.active:
            raise KeyError(ad.name)
        row = self.slots.reserve()  # leak: the rank check raises after the row is reserved
        if row < 0:
            raise RuntimeError("all adapter rows are used")
        if ad.rank > self.max_rank:
            raise ValueError(f"rank {ad.rank} of {ad.name} exceeds {self.max_rank}")
        self._write(row, ad)
        self.active[ad.name] = row
        return row

    def load_checked(self, ad: Adapter) -> int:
        if ad.name in self.active:
            return self.active[ad.name]
        row = self.slots.reserve()  # clean: near miss, the row is given up before the raise
        if row < 0:
            raise RuntimeError("all adapter rows are used")
        if ad.rank > self.max_rank:
            self.slots.unreserve(row)
            raise ValueError(f"rank {ad.rank} of {ad.name} exceeds {self.max_rank}")
        self._write(row, ad)
        self.active[ad.name] = row
        return row

    def restage(self, ad: Adapter) -> bool:
        """Upload a newer version of an adapter that is staged already."""
        row = self.slots.reserve()  # leak: the row staged before under the same name is overwritten and never unreserved
        if row < 0:
            return False
        self._write(row, ad)
        self.staged[ad.name] = row
        return True

    def unstage(self, name: str) -> None:
        if name in self.staged:
            self.slots.unreserve(self.staged.pop(name))

    def hot_swap(self, ad: Adapter) -> bool:
        row = self.slots.reserve()  # clean: near miss, the older row is unreserved before the entry changes
        if row < 0:
            return False
        old = self.active.pop(ad.name, None)
        if old is not None:
            self.slots.unreserve(old)
        self._write(row, ad)
        self.active[ad.name] = row
        return True

    def load_all(self, ads: Iterable[Adapter]) -> List[str]:
        skipped = []
        for ad in ads:
            if ad.name in self.active or ad.name in self.blocked:
                continue
            row = self.slots.reserve()  # clean: stored in active unless -1
            if row < 0:
                skipped.append(ad.name)
                continue
            self._write(row, ad)
            self.active[ad.name] = row
        return skipped

    def benchmark(self, ad: Adapter, x: torch.Tensor) -> torch.Tensor:
        row = self.slots.reserve()  # leak: result is computed and returned, the row stays reserved
        self._write(row, ad)
        y = x @ self.slots.lora_a[row].T @ self.slots.lora_b[row].T
        return y

    def unload(self, name: str) -> bool:
        row = self.active.pop(name, None)
        if row is None:
            return False
        self.slots.unreserve(row)
        return True

    def unload_all(self) -> None:
        for name in list(self.active):
            self.unload(name)
