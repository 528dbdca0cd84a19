from __future__ import annotations

from typing import Dict, List, Optional

from .slots import AdapterSlots


class AdapterManager:
    def __init__(self, slots: AdapterSlots, max_rank: int) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self.loaded: Dict[str, int] = {}
        self.ranks: Dict[str, int] = {}
        self.shadow: Dict[str, int] = {}

    def _claim(self, name: str) -> Optional[int]:
        return self.slots.claim(name)  # clean: handed to the caller

    def claim_or_evict(self, name: str) -> Optional[int]:
        slot = self._claim(name)  # clean: near miss, rebound only when None
        if slot is None and self.loaded:
            self.unload(next(iter(self.loaded)))
            slot = self._claim(name)  # clean: handed to the caller
        return slot

    def load(self, name: str, rank: int) -> bool:
        if name in self.loaded:
            return True
        slot = self.claim_or_evict(name)  # leak: a rank too large is refused after the claim
        if slot is None:
            return False
        if rank > self.max_rank:
            return False
        self.loaded[name] = slot
        self.ranks[name] = rank
        return True

    def load_shadow(self, name: str, rank: int) -> bool:
        slot = self._claim(name)  # leak: a second shadow of the same name overwrites the first
        if slot is None:
            return False
        self.shadow[name] = slot
        self.ranks[name] = rank
        return True

    def drop_shadow(self, name: str) -> None:
        slot = self.shadow.pop(name, None)
        if slot is not None:
            self.slots.vacate(slot)

    def swap(self, name: str) -> bool:
        slot = self._claim(name)  # clean: near miss, the old slot is vacated after the overwrite
        if slot is None:
            return False
        old = self.loaded.get(name)
        self.loaded[name] = slot
        if old is not None:
            self.slots.vacate(old)
        return True

    def unload(self, name: str) -> None:
        slot = self.loaded.pop(name, None)
        if slot is not None:
            self.slots.vacate(slot)

    def warmup(self, names: List[str]) -> int:
        n = 0
        for name in names:
            slot = self._claim(name)  # clean: vacated each round
            if slot is None:
                break
            n += 1
            self.slots.vacate(slot)
        return n
