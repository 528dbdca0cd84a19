"""Leases tie a slot to the code that uses it."""
from __future__ import annotations

from typing import Optional

import torch

from .slots import NoSlot, SlotTable


class SlotLease:
    """Shared lease; the slot is vacated when the last holder lets go."""

    def __init__(self, table: SlotTable, slot: int, expert: int):
        self.table = table
        self.slot = slot
        self.expert = expert
        self._holders = 1

    @property
    def weights(self) -> torch.Tensor:
        return self.table.weights(self.slot)

    def share(self) -> "SlotLease":
        self._holders += 1
        return self

    def let_go(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self.table.vacate(self.slot)


def acquire_lease(table: SlotTable, expert: int, src: torch.Tensor) -> Optional[SlotLease]:
    try:
        slot = table.reserve()  # clean: near miss, wrapped in the lease, with NoSlot nothing was reserved
    except NoSlot:
        return None
    table.weights(slot).copy_(src, non_blocking=True)
    return SlotLease(table, slot, expert)


def acquire_lease_checked(table: SlotTable, expert: int, src: torch.Tensor, timeout: float) -> Optional[SlotLease]:
    """Also verifies the upload, bad host memory has bitten us before."""
    slot = table.reserve_wait(timeout)  # leak: a failed comparison returns None without vacating
    if slot is None:
        return None
    dst = table.weights(slot)
    dst.copy_(src)
    if not torch.equal(dst.cpu(), src):
        return None
    return SlotLease(table, slot, expert)
