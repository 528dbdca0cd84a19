"""Ledger of device slots on one host, shared by the workers of an elastic job."""
from __future__ import annotations

import threading
import time
from typing import Dict, List, NamedTuple, Optional


class Grant(NamedTuple):
    slot: int
    epoch: int


class SlotLedger:
    """Claims are (slot, epoch) pairs; a surrender with an old epoch is refused."""

    def __init__(self, num_slots: int) -> None:
        self._owners: List[Optional[str]] = [None] * num_slots
        self._epochs = [0] * num_slots
        self._guard = threading.Lock()

    def claim(self, owner: str) -> Optional[Grant]:
        with self._guard:
            for slot, current in enumerate(self._owners):
                if current is None:
                    self._owners[slot] = owner
                    self._epochs[slot] += 1
                    return Grant(slot, self._epochs[slot])
        return None

    def surrender(self, grant: Grant) -> None:
        with self._guard:
            if self._epochs[grant.slot] != grant.epoch:
                raise ValueError(f"stale grant for slot {grant.slot}")
            self._owners[grant.slot] = None

    def claim_blocking(self, owner: str, deadline: float) -> Grant:
        while True:
            grant = self.claim(owner)  # clean: near miss, returned as soon as there is one, None goes round again
            if grant is not None:
                return grant
            if time.monotonic() > deadline:
                raise TimeoutError(f"{owner}: no slot")
            time.sleep(0.001)

    def claim_many(self, owner: str, count: int) -> List[Grant]:
        """Up to count grants, fewer when the host is full."""
        grants: List[Grant] = []
        for _ in range(count):
            grant = self.claim(owner)  # clean: returned in the list
            if grant is None:
                break
            grants.append(grant)
        return grants

    def claimed(self) -> Dict[int, str]:
        with self._guard:
            return {i: o for i, o in enumerate(self._owners) if o is not None}
