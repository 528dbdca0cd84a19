"""LoRA multiplexing: a fixed set of adapter slots on the device, picked by a bitmap."""
from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

NO_SLOT = -1


class SlotBitmap:
    def __init__(self, n: int) -> None:
        self.n = n
        self.mask = (1 << n) - 1
        self._mu = threading.Lock()

    def claim(self) -> int:
        with self._mu:
            if self.mask == 0:
                return NO_SLOT
            low = self.mask & -self.mask
            self.mask ^= low
            return low.bit_length() - 1

    def unclaim(self, slot: int) -> None:
        with self._mu:
            self.mask |= 1 << slot

    def claim_pair(self) -> tuple[int, int] | None:
        a = self.claim()  # leak: the first slot stays claimed when there is no second
        if a == NO_SLOT:
            return None
        b = self.claim()  # clean: returned with a, or there was no slot to give back
        if b == NO_SLOT:
            return None
        return a, b


@dataclass
class Adapter:
    name: str
    rank: int
    path: str


class Resident:
    def __init__(self, adapter: Adapter, slot: int) -> None:
        self.adapter = adapter
        self.slot = slot
        self.users = 0


class LoraBank:
    def __init__(self, n_slots: int, max_rank: int, dim: int, device: str = "cuda") -> None:
        self.bitmap = SlotBitmap(n_slots)
        self.max_rank = max_rank
        self.a = torch.zeros(n_slots, max_rank, dim, device=device)
        self.b = torch.zeros(n_slots, dim, max_rank, device=device)
        self.resident: OrderedDict[str, Resident] = OrderedDict()
        self._loading = asyncio.Lock()

    # users of resident adapters

    def retain(self, name: str) -> Resident | None:
        res = self.resident.get(name)
        if res is None:
            return None
        res.users += 1
        self.resident.move_to_end(name)
        return res

    def unretain(self, res: Resident) -> None:
        res.users -= 1

    def _evict_one(self) -> bool:
        for name, res in self.resident.items():
            if res.users == 0:
                del self.resident[name]
                self.bitmap.unclaim(res.slot)
                return True
        return False

    # loading

    def _claim_or_evict(self) -> int:
        slot = self.bitmap.claim()  # clean: near miss, claimed again only when there was no slot
        while slot == NO_SLOT and self._evict_one():
            slot = self.bitmap.claim()  # clean: returned to the caller
        return slot

    def load(self, adapter: Adapter) -> Resident | None:
        slot = self._claim_or_evict()  # leak: not unclaimed when the rank is over the maximum
        if slot == NO_SLOT:
            return None
        if adapter.rank > self.max_rank:
            logger.error("rank %d of %s is over %d", adapter.rank, adapter.name, self.max_rank)
            return None
        weights = torch.load(adapter.path, map_location="cpu")
        self._copy(slot, weights)
        res = Resident(adapter, slot)
        self.resident[adapter.name] = res
        return res

    async def load_async(self, adapter: Adapter) -> Resident | None:
        async with self._loading:
            known = self.resident.get(adapter.name)
            if known is not None:
                return known
            slot = self._claim_or_evict()  # clean: unclaimed on any failure, else owned by the resident
            if slot == NO_SLOT:
                return None
            try:
                weights = await asyncio.to_thread(torch.load, adapter.path, map_location="cpu")
                self._copy(slot, weights)
            except BaseException:
                self.bitmap.unclaim(slot)
                raise
            res = Resident(adapter, slot)
            self.resident[adapter.name] = res
            return res

    def replace(self, adapter: Adapter) -> bool:
        """Load a new version next to the old one, then switch over."""
        slot = self.bitmap.claim()  # leak: lost when the old version is still in use
        if slot == NO_SLOT:
            return False
        old = self.resident.get(adapter.name)
        if old is not None and old.users:
            return False
        self._copy(slot, torch.load(adapter.path, map_location="cpu"))
        self.resident[adapter.name] = Resident(adapter, slot)
        if old is not None:
            self.bitmap.unclaim(old.slot)
        return True

    def _copy(self, slot: int, weights: dict[str, torch.Tensor]) -> None:
        r = weights["a"].shape[0]
        self.a[slot, :r].copy_(weights["a"])
        self.b[slot, :, :r].copy_(weights["b"])

    def unload(self, name: str) -> None:
        res = self.resident.pop(name, None)
        if res is not None:
            self.bitmap.unclaim(res.slot)


class BatchMapper:
    """Maps each row of a batch to the slot of its adapter for the punica kernel."""

    def __init__(self, bank: LoraBank) -> None:
        self.bank = bank
        self.held: list[Resident] = []

    def open(self, names: list[str | None]) -> torch.Tensor:
        rows = torch.full((len(names),), NO_SLOT, dtype=torch.int32)
        for i, name in enumerate(names):
            if name is None:
                continue
            res = self.bank.retain(name)  # clean: near miss, moved into self.held, which close() empties
            if res is None:
                raise KeyError(name)
            self.held.append(res)
            rows[i] = res.slot
        return rows

    def close(self) -> None:
        while self.held:
            self.bank.unretain(self.held.pop())

    def __enter__(self) -> "BatchMapper":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def ranks(self, names: list[str]) -> list[int]:
        out = []
        for name in names:
            res = self.bank.retain(name)  # leak: the continue for paused adapters skips unretain
            if res is None:
                out.append(0)
                continue
            if res.adapter.path.endswith(".paused"):
                out.append(-1)
                continue
            out.append(res.adapter.rank)
            self.bank.unretain(res)
        return out


def same_rank(bank: LoraBank, left: str, right: str) -> bool:
    a = bank.retain(left)  # leak: kept when the right adapter is not resident
    if a is None:
        return False
    b = bank.retain(right)  # clean: unretained with a, or None
    if b is None:
        return False
    try:
        return a.adapter.rank == b.adapter.rank
    finally:
        bank.unretain(b)
        bank.unretain(a)


def swap_rows(bank: LoraBank, left: str, right: str) -> bool:
    a = bank.retain(left)  # clean: unretained whenever it is not None
    b = bank.retain(right)  # clean: unretained whenever it is not None
    try:
        if a is None or b is None:
            return False
        tmp = bank.a[a.slot].clone()
        bank.a[a.slot].copy_(bank.a[b.slot])
        bank.a[b.slot].copy_(tmp)
        a.slot, b.slot = b.slot, a.slot
        return True
    finally:
        if a is not None:
            bank.unretain(a)
        if b is not None:
            bank.unretain(b)
