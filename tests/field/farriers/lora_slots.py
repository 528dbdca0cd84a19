"""Adapter slots on the device for multi-LoRA rollouts. A slot stays pinned while a batch uses it."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


class AdapterSlot:
    def __init__(self, index: int, rank: int, hidden: int, device: str) -> None:
        self.index = index
        self.name: str | None = None
        self.pins = 0
        self.a = torch.zeros(rank, hidden, device=device)
        self.b = torch.zeros(hidden, rank, device=device)


class AdapterTable:
    def __init__(self, n: int, rank: int, hidden: int, device: str = "cuda") -> None:
        self.slots = [AdapterSlot(i, rank, hidden, device) for i in range(n)]
        self._lru: OrderedDict[str, AdapterSlot] = OrderedDict()
        self._empty = list(self.slots)

    def _victim(self) -> AdapterSlot | None:
        for name, slot in self._lru.items():
            if slot.pins == 0:
                del self._lru[name]
                return slot
        return None

    def pin(self, name: str) -> AdapterSlot | None:
        slot = self._lru.get(name)
        if slot is None:
            return None
        self._lru.move_to_end(name)
        slot.pins += 1
        return slot

    def unpin(self, slot: AdapterSlot) -> None:
        slot.pins -= 1
        assert slot.pins >= 0, slot.name

    def reserve(self) -> AdapterSlot | None:
        return self._empty.pop() if self._empty else self._victim()

    def unreserve(self, slot: AdapterSlot) -> None:
        slot.name = None
        self._empty.append(slot)

    def commit(self, slot: AdapterSlot, name: str) -> None:
        slot.name = name
        self._lru[name] = slot

    def has(self, name: str) -> bool:
        return name in self._lru

    def compact(self) -> int:
        moved = 0
        for name in list(self._lru):
            slot = self._lru[name]
            if slot.pins:
                continue
            slot = self._lru.pop(name)  # leak: an idle adapter is forgotten, its slot comes back only when it sits in the upper half
            if slot.index >= len(self.slots) // 2:
                self.unreserve(slot)
                moved += 1
        return moved

    def evict(self, name: str) -> bool:
        slot = self._lru.pop(name, None)  # clean: near miss, put back into the map while pinned, otherwise unreserved
        if slot is None:
            return False
        if slot.pins:
            self._lru[name] = slot
            return False
        self.unreserve(slot)
        return True


class LoraLoader:
    def __init__(self, table: AdapterTable, root: Path) -> None:
        self.table = table
        self.root = root

    def _read(self, name: str) -> dict[str, torch.Tensor] | None:
        path = self.root / name / "adapter.pt"
        if not path.exists():
            return None
        return torch.load(path, map_location="cpu", weights_only=True)

    def load(self, name: str) -> bool:
        slot = self.table.reserve()  # leak: a missing adapter file returns with the slot in neither list
        if slot is None:
            return False
        w = self._read(name)
        if w is None:
            logger.warning("no adapter %s", name)
            return False
        slot.a.copy_(w["a"])
        slot.b.copy_(w["b"])
        self.table.commit(slot, name)
        return True

    def reload(self, name: str) -> bool:
        w = self._read(name)
        if w is None:
            return False
        slot = self.table.pin(name)  # clean: near miss, refreshed in place and unpinned even on a shape error
        if slot is None:
            return self.load(name)
        try:
            slot.a.copy_(w["a"])
            slot.b.copy_(w["b"])
        except RuntimeError as e:
            logger.error("reload %s: %s", name, e)
            return False
        finally:
            self.table.unpin(slot)
        return True

    def merge(self, dst: str, srcs: list[str]) -> bool:
        if self.table.has(dst):
            return False
        out = self.table.reserve()  # clean: near miss, unreserved when a source is missing, committed otherwise
        if out is None:
            return False
        out.a.zero_()
        out.b.zero_()
        for s in srcs:
            src = self.table.pin(s)  # clean: near miss, unpinned in its own turn before the next can fail
            if src is None:
                self.table.unreserve(out)
                return False
            out.a.add_(src.a, alpha=1.0 / len(srcs))
            out.b.add_(src.b, alpha=1.0 / len(srcs))
            self.table.unpin(src)
        self.table.commit(out, dst)
        return True


class BatchAdapters:
    """Pins for one decode batch."""

    def __init__(self, table: AdapterTable, loader: LoraLoader) -> None:
        self.table = table
        self.loader = loader
        self._held: dict[str, AdapterSlot] = {}
        self._draft: AdapterSlot | None = None

    def _pin_or_load(self, name: str) -> AdapterSlot | None:
        slot = self.table.pin(name)  # clean: handed to the caller
        if slot is not None:
            return slot
        if not self.loader.load(name):
            return None
        return self.table.pin(name)  # clean: handed to the caller

    def prepare(self, names: list[str]) -> list[int] | None:
        index: list[int] = []
        for name in names:
            if name in self._held:
                index.append(self._held[name].index)
                continue
            slot = self._pin_or_load(name)  # clean: near miss, recorded in _held at once and the failing return unpins those through finish
            if slot is None:
                self.finish()
                return None
            self._held[name] = slot
            index.append(slot.index)
        return index

    def set_draft(self, name: str) -> bool:
        self._draft = self._pin_or_load(name)  # leak: finish forgets the draft and the next batch overwrites it
        return self._draft is not None

    def extend(self, names: list[str]) -> int:
        n = 0
        for name in names:
            slot = self._pin_or_load(name)  # leak: an adapter already held is pinned a second time and unpinned once
            if slot is None:
                break
            self._held[name] = slot
            n += 1
        return n

    def warm(self, names: list[str], budget_s: float) -> int:
        t0 = time.monotonic()
        n = 0
        for name in names:
            slot = self._pin_or_load(name)  # leak: out of budget, the loop is left with the last one still pinned
            if slot is None:
                continue
            slot.a.abs_().mul_(1.0)
            if time.monotonic() - t0 > budget_s:
                break
            self.table.unpin(slot)
            n += 1
        return n

    def finish(self) -> None:
        for slot in self._held.values():
            self.table.unpin(slot)
        self._held.clear()
