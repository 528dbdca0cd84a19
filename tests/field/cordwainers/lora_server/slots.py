"""Device slots for adapter weights, and the references requests hold on resident adapters."""
from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass
class Resident:
    name: str
    slot: int
    rank: int
    refs: int = 0
    last_used: int = 0


class SlotBank:
    """Fixed slots in one big weight tensor."""

    def __init__(self, n: int, rank: int, dim: int) -> None:
        self.weights = torch.zeros(n, rank, dim)
        self._vacant = list(range(n))

    def take_slot(self) -> int | None:
        return self._vacant.pop() if self._vacant else None

    def put_slot(self, slot: int) -> None:
        self.weights[slot].zero_()
        self._vacant.append(slot)


class AdapterTable:
    def __init__(self, bank: SlotBank) -> None:
        self.bank = bank
        self._by_name: dict[str, Resident] = {}
        self._clock = 0
        self._mu = threading.Lock()

    def _evict_one(self) -> bool:
        idle = [r for r in self._by_name.values() if r.refs == 0]
        if not idle:
            return False
        victim = min(idle, key=lambda r: r.last_used)
        del self._by_name[victim.name]
        self.bank.put_slot(victim.slot)
        return True

    def load(self, name: str, weights: torch.Tensor) -> bool:
        with self._mu:
            if name in self._by_name:
                return True
            slot = self.bank.take_slot()  # clean: near miss, None where it is taken again
            if slot is None:
                if not self._evict_one():
                    return False
                slot = self.bank.take_slot()  # clean: kept by the Resident, eviction and unload put it back
            self.bank.weights[slot, : weights.shape[0]] = weights
            self._by_name[name] = Resident(name, slot, weights.shape[0])
            return True

    def reload(self, name: str, weights: torch.Tensor) -> None:
        """A new version of an adapter; the old one is replaced when the weights are in place."""
        with self._mu:
            slot = self.bank.take_slot()  # leak: weights of too high a rank return with the slot
            if slot is None:
                return
            if weights.shape[0] > self.bank.weights.shape[1]:
                return
            self.bank.weights[slot, : weights.shape[0]] = weights
            old = self._by_name.get(name)
            if old is not None:
                self.bank.put_slot(old.slot)
                old.slot, old.rank = slot, weights.shape[0]
            else:
                self._by_name[name] = Resident(name, slot, weights.shape[0])

    def ref(self, name: str) -> Resident | None:
        """A reference keeps the adapter from being evicted; undo it with `unref`."""
        with self._mu:
            res = self._by_name.get(name)
            if res is None:
                return None
            self._clock += 1
            res.refs += 1
            res.last_used = self._clock
            return res

    def unref(self, res: Resident) -> None:
        with self._mu:
            res.refs -= 1

    def unload(self, name: str) -> bool:
        with self._mu:
            res = self._by_name.get(name)
            if res is None or res.refs:
                return False
            del self._by_name[name]
            self.bank.put_slot(res.slot)
            return True
