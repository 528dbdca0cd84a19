from __future__ import annotations

from typing import List, Optional

from .manager import AdapterManager


class LoraServer:
    def __init__(self, mgr: AdapterManager) -> None:
        self.mgr = mgr

    def merge_once(self, name: str, dry_run: bool) -> Optional[int]:
        slot = self.mgr.claim_or_evict(name)  # leak: dry_run returns with the slot claimed
        if slot is None:
            return None
        if dry_run:
            return 0
        self.mgr.slots.vacate(slot)
        return slot

    def eval_pair(self, a: str, b: str) -> bool:
        sa = self.mgr._claim(a)  # clean: vacated on both ways
        if sa is None:
            return False
        sb = self.mgr._claim(b)  # clean: vacated below
        if sb is None:
            self.mgr.slots.vacate(sa)
            return False
        self.mgr.slots.vacate(sb)
        self.mgr.slots.vacate(sa)
        return True

    def rank_by_slot(self, names: List[str]) -> List[int]:
        order = [self.mgr._claim(n) for n in names]  # leak: the list is sorted into a new list of ints and dropped
        return sorted(0 if s is None else s for s in order)
