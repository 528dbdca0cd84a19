"""LoRA adapter slots on the device: a fixed bank with reference counts and LRU eviction."""
from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Iterator

import torch


class BankFull(Exception):
    pass


class AdapterMissing(LookupError):
    pass


class SlotBank:
    """Rows of the stacked A and B matrices."""

    def __init__(self, slots: int, rank: int, dim: int):
        self.a = torch.zeros(slots, rank, dim)
        self.b = torch.zeros(slots, dim, rank)
        self._mask = (1 << slots) - 1

    def occupy(self) -> int:
        if self._mask == 0:
            raise BankFull
        low = self._mask & -self._mask
        self._mask ^= low
        return low.bit_length() - 1

    def occupy_or(self, default: int = -1) -> int:
        try:
            return self.occupy()  # clean: returned to the caller
        except BankFull:
            return default

    def vacate(self, row: int) -> None:
        self._mask |= 1 << row


@dataclasses.dataclass
class Resident:
    name: str
    row: int
    users: int = 0


class AdapterCache:
    def __init__(self, bank: SlotBank, root: Path):
        self.bank = bank
        self.root = root
        self._by_name: OrderedDict[str, Resident] = OrderedDict()
        self._lock = threading.RLock()

    def _evict_one(self) -> bool:
        for name, res in self._by_name.items():
            if res.users == 0:
                del self._by_name[name]
                self.bank.vacate(res.row)
                return True
        return False

    def _row(self) -> int:
        row = self.bank.occupy_or(-1)  # clean: near miss, -1 means nothing was occupied, any other row is returned
        while row < 0:
            if not self._evict_one():
                raise BankFull
            row = self.bank.occupy_or(-1)  # clean: returned to the caller
        return row

    def load(self, name: str) -> Resident:
        row = self._row()  # leak: a missing file raises AdapterMissing with the row occupied
        path = self.root / f"{name}.pt"
        if not path.exists():
            raise AdapterMissing(name)
        state = torch.load(path)
        self.bank.a[row].copy_(state["a"])
        self.bank.b[row].copy_(state["b"])
        res = self._by_name[name] = Resident(name, row)
        return res

    def load_checked(self, name: str) -> Resident | None:
        if name in self._by_name:
            return self._by_name[name]
        path = self.root / f"{name}.pt"
        if not path.exists():
            return None
        state = torch.load(path)
        row = self._row()  # clean: vacated when the rank does not fit, otherwise resident
        if state["a"].shape != self.bank.a[row].shape:
            self.bank.vacate(row)
            return None
        self.bank.a[row].copy_(state["a"])
        self.bank.b[row].copy_(state["b"])
        res = self._by_name[name] = Resident(name, row)
        return res

    def preload(self, names: list[str]) -> int:
        n = 0
        for name in names:
            row = self.bank.occupy_or()  # leak: an adapter already resident is skipped after its row was occupied
            if row < 0:
                break
            if name in self._by_name:
                continue
            self._by_name[name] = Resident(name, row)
            n += 1
        return n

    def pin(self, name: str) -> Resident:
        with self._lock:
            res = self._by_name.get(name)
            if res is None:
                res = self.load(name)  # clean: its row stays with the resident in _by_name, which eviction and clear vacate
            self._by_name.move_to_end(name)
            res.users += 1
            return res

    def pin_resident(self, name: str) -> Resident | None:
        with self._lock:
            res = self._by_name.get(name)
            if res is not None:
                res.users += 1
            return res

    def unpin(self, res: Resident) -> None:
        with self._lock:
            res.users -= 1

    def clear(self) -> None:
        with self._lock:
            while self._by_name:
                _, res = self._by_name.popitem()
                self.bank.vacate(res.row)

    def reload(self, name: str) -> bool:
        self._lock.acquire()  # leak: an adapter that is not resident returns False with the lock held
        res = self._by_name.get(name)
        if res is None:
            return False
        state = torch.load(self.root / f"{name}.pt")
        self.bank.a[res.row].copy_(state["a"])
        self.bank.b[res.row].copy_(state["b"])
        self._lock.release()
        return True

    def rename(self, old: str, new: str) -> None:
        self._lock.acquire()  # clean: near miss, the early return is inside the try whose finally releases
        try:
            if old not in self._by_name or new in self._by_name:
                return
            self._by_name[new] = self._by_name.pop(old)
        finally:
            self._lock.release()


class LoraBatch:
    """Collects the adapters of one batch; close() unpins them."""

    def __init__(self, cache: AdapterCache):
        self.cache = cache
        self.pins: dict[str, Resident] = {}

    def row_for(self, name: str) -> int:
        res = self.pins.get(name)
        if res is None:
            res = self.pins[name] = self.cache.pin(name)  # clean: near miss, pinned once for each name and close unpins
        return res.row

    def close(self) -> None:
        for res in self.pins.values():
            self.cache.unpin(res)
        self.pins.clear()

    def __enter__(self) -> LoraBatch:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class Engine:
    def __init__(self, cache: AdapterCache):
        self.cache = cache
        self.sessions: dict[str, Resident] = {}
        self.defaults: dict[str, Resident] = {}

    def apply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        res = self.cache.pin(name)  # clean: unpinned in finally
        try:
            bank = self.cache.bank
            return x + (x @ bank.a[res.row].t()) @ bank.b[res.row].t()
        finally:
            self.cache.unpin(res)

    def apply_many(self, names: list[str], x: torch.Tensor) -> torch.Tensor:
        with LoraBatch(self.cache) as lb:
            rows = [lb.row_for(n) for n in names]  # clean: pins are kept by the batch, which closes at the end of the with
            return torch.stack([x @ self.cache.bank.a[r].t() for r in rows])

    def norm(self, name: str) -> float:
        row = self.cache.pin(name).row  # leak: only the row is kept, so nobody can unpin the resident
        return float(self.cache.bank.a[row].norm())

    def set_default(self, tenant: str, name: str) -> None:
        self.defaults[tenant] = self.cache.pin(name)  # leak: a second default for the tenant overwrites the first, which stays pinned

    def drop_defaults(self) -> None:
        while self.defaults:
            self.cache.unpin(self.defaults.popitem()[1])

    def switch(self, session: str, name: str) -> bool:
        fresh = self.cache.pin_resident(name)  # clean: near miss, None changes nothing and otherwise the old resident is unpinned
        if fresh is None:
            return False
        old = self.sessions.get(session)
        self.sessions[session] = fresh
        if old is not None:
            self.cache.unpin(old)
        return True

    def detach(self, session: str) -> None:
        res = self.sessions.pop(session, None)
        if res is not None:
            self.cache.unpin(res)
