"""LoRA adapter slots on the device, with host-side staging."""
from __future__ import annotations

import logging
from typing import Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


class SlotTable:
    def __init__(self, n: int):
        self._vacant: List[int] = list(range(n))

    def claim(self) -> int:
        """Slot number, or -1 if all are in use."""
        if len(self._vacant) == 0:
            return -1
        return self._vacant.pop()  # clean: returned to the caller

    def vacate(self, slot: int) -> None:
        self._vacant.append(slot)


class StagingArea:
    """Pinned host tensors for adapter uploads."""

    def __init__(self, count: int, numel: int):
        self._bufs = [torch.empty(numel) for _ in range(count)]

    def checkout(self) -> Optional[torch.Tensor]:
        try:
            return self._bufs.pop()  # clean: returned to the caller
        except IndexError:
            return None

    def checkin(self, buf: torch.Tensor) -> None:
        self._bufs.append(buf)


class LoRAManager:
    def __init__(self, slots: SlotTable, staging: StagingArea, device_rows: torch.Tensor):
        self.slots = slots
        self.staging = staging
        self.rows = device_rows
        self.by_name: Dict[str, int] = {}
        self.pinned: Dict[str, int] = {}

    def activate(self, name: str, weights: torch.Tensor) -> bool:
        if name in self.by_name:
            return True
        slot = self.slots.claim()  # leak: without a staging buffer it returns and keeps the slot
        if slot < 0:
            return False
        buf = self.staging.checkout()  # clean: checked in after the upload
        if buf is None:
            logger.warning("no staging buffer for %s", name)
            return False
        buf[: weights.numel()].copy_(weights.flatten())
        self.rows[slot, : weights.numel()].copy_(buf[: weights.numel()])
        self.staging.checkin(buf)
        self.by_name[name] = slot
        return True

    def activate_pinned(self, name: str, weights: torch.Tensor) -> bool:
        slot = self.slots.claim()  # clean: near miss, vacated when no buffer is to be had, otherwise kept in pinned
        if slot == -1:
            return False
        buf = self.staging.checkout()  # clean: near miss, the return without checkin is the None branch
        if buf is None:
            self.slots.vacate(slot)
            return False
        n = weights.numel()
        buf[:n].copy_(weights.flatten())
        self.rows[slot, :n].copy_(buf[:n])
        self.staging.checkin(buf)
        old = self.pinned.pop(name, None)
        if old is not None:
            self.slots.vacate(old)
        self.pinned[name] = slot
        return True

    def reload(self, name: str, weights: torch.Tensor) -> None:
        """Upload new weights for name into a new slot."""
        slot = self.slots.claim()  # leak: overwrites the entry of by_name, whose old slot is never vacated
        if slot < 0:
            logger.warning("no slot to reload %s", name)
            return
        self.rows[slot, : weights.numel()].copy_(weights.flatten())
        self.by_name[name] = slot

    def upload(self, slot: int, weights: torch.Tensor, buf: Optional[torch.Tensor] = None) -> bool:
        """Upload through buf, or through a buffer of our own if none is given."""
        own = buf is None
        if own:
            buf = self.staging.checkout()  # clean: near miss, checked in under the same flag
            if buf is None:
                return False
        n = weights.numel()
        buf[:n].copy_(weights.flatten())
        self.rows[slot, :n].copy_(buf[:n])
        if own:
            self.staging.checkin(buf)
        return True

    def upload_stack(self, slot: int, parts: List[torch.Tensor], keep: bool) -> int:
        buf = self.staging.checkout()  # leak: with keep set nobody checks the buffer in
        if buf is None:
            return 0
        done = 0
        for part in parts:
            if self.upload(slot, part, buf):
                done += 1
        if not keep:
            self.staging.checkin(buf)
        return done

    def warmup(self, shapes: List[int]) -> int:
        ok = 0
        for n in shapes:
            slot = self.slots.claim()  # clean: near miss, continue happens only after vacate or for -1
            if slot < 0:
                continue
            if n > self.rows.shape[1]:
                self.slots.vacate(slot)
                continue
            self.rows[slot, :n].zero_()
            ok += 1
            self.slots.vacate(slot)
        return ok

    def validate(self, adapters: Dict[str, torch.Tensor]) -> List[str]:
        bad: List[str] = []
        for name, weights in adapters.items():
            buf = self.staging.checkout()  # leak: continue for an oversized adapter skips the checkin
            if buf is None:
                return bad
            if weights.numel() > buf.numel():
                bad.append(name)
                continue
            buf[: weights.numel()].copy_(weights.flatten())
            if not torch.isfinite(buf[: weights.numel()]).all():
                bad.append(name)
            self.staging.checkin(buf)
        return bad

    def deactivate(self, name: str) -> None:
        slot = self.by_name.pop(name, None)
        if slot is not None:
            self.slots.vacate(slot)
        slot = self.pinned.pop(name, None)
        if slot is not None:
            self.slots.vacate(slot)
