"""Adapters that are resident, with the number of requests that use each."""
from __future__ import annotations

from dataclasses import dataclass

from .banks import Bank, BankSet


@dataclass
class Resident:
    name: str
    bank: Bank
    uses: int = 0


class AdapterTable:
    def __init__(self, banks: BankSet) -> None:
        self._banks = banks
        self._resident: dict[str, Resident] = {}

    def use(self, name: str, rank: int) -> Resident | None:
        """The resident adapter with one more use; end_use() drops it."""
        resident = self._resident.get(name)
        if resident is None:
            bank = self._banks.claim()  # leak: a load that is refused gives None and the bank is lost
            if bank is None:
                bank = self._evict()  # leak: a load that is refused loses the evicted bank the same way
            if bank is None or not bank.load(name, rank):
                return None
            resident = self._resident[name] = Resident(name, bank)
        resident.uses += 1  # clean: the use belongs to the caller
        return resident

    def end_use(self, resident: Resident) -> None:
        resident.uses -= 1

    def _evict(self) -> Bank | None:
        for name, resident in self._resident.items():
            if resident.uses == 0:
                del self._resident[name]
                return resident.bank
        return None

    def preload(self, name: str, rank: int) -> bool:
        if name in self._resident:
            return True
        bank = self._banks.claim()  # clean: near miss, surrendered when the load is refused, else tabled
        if bank is None:
            return False
        if not bank.load(name, rank):
            self._banks.surrender(bank)
            return False
        self._resident[name] = Resident(name, bank)
        return True

    def unload(self, name: str) -> bool:
        resident = self._resident.get(name)
        if resident is None or resident.uses:
            return False
        del self._resident[name]
        self._banks.surrender(resident.bank)
        return True
