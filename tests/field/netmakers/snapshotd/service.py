"""Front end: take a snapshot, keep the latest few, restore from memory."""
from __future__ import annotations

import io
import logging
from collections import OrderedDict

import torch

from .slots import Slot, SlotTable
from .uploader import Uploader

log = logging.getLogger(__name__)


def _encode(t: torch.Tensor) -> bytes:
    b = io.BytesIO()
    torch.save(t, b)
    return b.getvalue()


class SnapshotService:
    def __init__(self, table: SlotTable, uploader: Uploader, keep: int = 2, upload_every: int = 1) -> None:
        self.table = table
        self.uploader = uploader
        self.keep = keep
        self.upload_every = upload_every
        self.recent: OrderedDict[int, Slot] = OrderedDict()
        self.taken = 0

    def _retain(self, step: int, slot: Slot) -> None:
        stale = self.recent.pop(step, None)
        if stale is not None:
            stale.let_go()
        self.recent[step] = slot
        while len(self.recent) > self.keep:
            _, old = self.recent.popitem(last=False)
            old.let_go()

    def _fill(self, slot: Slot, step: int, state: dict[str, torch.Tensor]) -> None:
        slot.step = step
        for k, t in state.items():
            slot.blobs[k] = _encode(t)

    def snapshot(self, step: int, state: dict[str, torch.Tensor]) -> bool:
        slot = self.table.vacant_wait(timeout=30.0)  # clean: near miss, handed to _retain, which lets older ones go
        if slot is None:
            return False
        self._fill(slot, step, state)
        self.taken += 1
        if self.taken % self.upload_every == 0:
            self.uploader.submit(slot)
        self._retain(step, slot)
        return True

    def snapshot_changed(self, step: int, state: dict[str, torch.Tensor]) -> bool:
        slot = self.table.vacant()  # leak: let go by nobody when nothing has changed since the last one
        if slot is None:
            return False
        self._fill(slot, step, state)
        last = next(reversed(self.recent.values()), None)
        if last is not None and last.blobs == slot.blobs:
            log.debug("step %d equals step %d", step, last.step)
            return False
        self._retain(step, slot)
        return True

    def emergency(self, step: int, state: dict[str, torch.Tensor]) -> bool:
        """Uploads at once, on the caller's thread, and keeps nothing."""
        slot = self.table.vacant()  # leak: rebound by vacant_wait() after a slot that was found
        if slot is None or self.recent:
            slot = self.table.vacant_wait(timeout=5.0)  # clean: let go in finally
        if slot is None:
            return False
        try:
            self._fill(slot, step, state)
            return self.uploader.upload(slot)
        finally:
            slot.let_go()

    def restore(self, step: int | None, device: torch.device) -> dict[str, torch.Tensor] | None:
        if step is None:
            step = next(reversed(self.recent), -1)
        slot = self.recent.get(step)
        if slot is None:
            return None
        slot.hold()  # clean: let go in finally
        try:
            return {k: torch.load(io.BytesIO(b), map_location=device) for k, b in slot.blobs.items()}
        finally:
            slot.let_go()

    def peek(self, step: int, key: str) -> torch.Tensor | None:
        slot = self.recent.get(step)
        if slot is None:
            return None
        held = slot.hold()  # leak: a key that the slot does not have returns without let_go
        blob = held.blobs.get(key)
        if blob is None:
            return None
        out = torch.load(io.BytesIO(blob))
        held.let_go()
        return out

    def close(self) -> None:
        self.uploader.stop()
        while self.recent:
            self.recent.popitem()[1].let_go()
