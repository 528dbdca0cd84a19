"""Adapter slots: LoRA weights are copied into fixed device slots and pinned while a request uses them."""
from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, Optional

import torch

log = logging.getLogger("lora")


class NoSlot(Exception):
    pass


@dataclass
class Slot:
    index: int
    adapter: Optional[str] = None
    pins: int = 0


class SlotTable:
    def __init__(self, n: int) -> None:
        self.slots = [Slot(i) for i in range(n)]
        self._lock = threading.Lock()

    def pin(self, adapter: str) -> Optional[Slot]:
        """A slot for the adapter, its pin count raised. None if every slot is pinned by others."""
        with self._lock:
            for slot in self.slots:
                if slot.adapter == adapter:
                    slot.pins += 1
                    return slot
            for slot in self.slots:
                if slot.pins == 0:
                    slot.adapter = adapter
                    slot.pins = 1
                    return slot
        return None

    def unpin(self, slot: Slot) -> None:
        with self._lock:
            slot.pins -= 1

    def pinned(self) -> int:
        return sum(s.pins > 0 for s in self.slots)


@dataclass
class AdapterRequest:
    rid: str
    adapter: Optional[str]
    slot: Optional[Slot] = None
    shadow: Optional[Slot] = None
    priority: int = 0


class AdapterManager:
    def __init__(self, table: SlotTable, loader: Callable[[str], dict[str, torch.Tensor]]) -> None:
        self.table = table
        self.loader = loader
        self.resident: set[str] = set()
        self.active: dict[str, AdapterRequest] = {}
        self.sticky: dict[str, Slot] = {}
        self.stats = {"hit": 0, "miss": 0, "denied": 0}

    def _load(self, slot: Slot, name: str) -> None:
        weights = self.loader(name)
        for key, value in weights.items():
            log.debug("slot %d <- %s %s", slot.index, key, tuple(value.shape))
        self.resident.add(name)

    def _checked_pin(self, name: str) -> Slot:
        slot = self.table.pin(name)  # clean: None raises without a lease, else handed on
        if slot is None:
            self.stats["denied"] += 1
            raise NoSlot(name)
        return slot

    def bind(self, req: AdapterRequest) -> bool:
        if req.adapter is None:
            self.active[req.rid] = req
            return True
        slot = self.table.pin(req.adapter)  # clean: kept by the request, release unpins it
        if slot is None:
            self.stats["denied"] += 1
            return False
        if req.adapter in self.resident:
            self.stats["hit"] += 1
        else:
            self.stats["miss"] += 1
            self._load(slot, req.adapter)
        req.slot = slot
        self.active[req.rid] = req
        return True

    def bind_with_shadow(self, req: AdapterRequest, candidate: str) -> bool:
        """Runs the candidate adapter next to the served one for comparison."""
        primary = self.table.pin(req.adapter or "base")  # leak: kept when the shadow gets no slot
        if primary is None:
            return False
        shadow = self.table.pin(candidate)  # leak: release unpins req.slot only, never req.shadow
        if shadow is None:
            log.info("no slot for the shadow of %s", req.rid)
            return False
        req.slot, req.shadow = primary, shadow
        self.active[req.rid] = req
        return True

    def release(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        if req.slot is not None:
            self.table.unpin(req.slot)
            req.slot = None

    def warm(self, names: list[str]) -> int:
        loaded = 0
        for name in names:
            slot = self.table.pin(name)  # leak: an adapter already resident is skipped while pinned
            if slot is None:
                break
            if name in self.resident:
                continue
            self._load(slot, name)
            self.table.unpin(slot)
            loaded += 1
        return loaded

    def verify(self, names: list[str], expect: dict[str, int]) -> list[str]:
        wrong = []
        for name in names:
            slot = self.table.pin(name)  # clean: unpinned in finally, the continue passes there too
            if slot is None:
                continue
            try:
                if name not in expect:
                    continue
                if len(self.loader(name)) != expect[name]:
                    wrong.append(name)
            finally:
                self.table.unpin(slot)
        return wrong

    def stick(self, tenant: str, name: str) -> None:
        """Keeps an adapter resident for a tenant."""
        fresh = self._checked_pin(name)  # clean: near miss, the former pin is popped and given back
        old = self.sticky.pop(tenant, None)
        self.sticky[tenant] = fresh
        if old is not None:
            self.table.unpin(old)

    def unstick(self, tenant: str) -> None:
        slot = self.sticky.pop(tenant, None)
        if slot is not None:
            self.table.unpin(slot)

    def rename_tenant(self, old: str, new: str) -> None:
        if old in self.sticky:
            self.stick(new, self.sticky[old].adapter or "base")
            self.unstick(old)

    def switch(self, req: AdapterRequest, name: str) -> None:
        """Mid-conversation change of adapter."""
        if req.slot is not None and req.slot.adapter == name:
            return
        fresh = self._checked_pin(name)  # clean: takes the place of the old pin, which is given back
        if name not in self.resident:
            self._load(fresh, name)
        if req.slot is not None:
            self.table.unpin(req.slot)
        req.slot = fresh
        req.adapter = name

    @contextmanager
    def using(self, name: str) -> Iterator[Slot]:
        slot = self._checked_pin(name)  # clean: unpinned in finally
        try:
            yield slot
        finally:
            self.table.unpin(slot)

    def merged_norm(self, name: str) -> float:
        with self.using(name) as slot:  # clean: context manager
            weights = self.loader(name)
            total = sum(float(w.norm()) for w in weights.values())
            return total / (1 + slot.index)

    def slot_of(self, name: str) -> int:
        return self._checked_pin(name).index  # leak: only the index leaves, the pinned slot is dropped

    def replace_all(self, mapping: dict[str, str]) -> int:
        moved = 0
        for req in self.active.values():
            target = mapping.get(req.adapter or "")
            if target is None or req.slot is None:
                continue
            fresh = self._checked_pin(target)  # leak: a request already on the target keeps a second pin for ever
            if fresh is req.slot:
                continue
            self.table.unpin(req.slot)
            req.slot = fresh
            req.adapter = target
            moved += 1
        return moved

    def snapshot(self, names: list[str]) -> dict[str, int]:
        held: list[Slot] = []
        for name in names:
            slot = self.table.pin(name)  # clean: near miss, the list is unpinned below
            if slot is not None:
                held.append(slot)
        view = {s.adapter or "": s.index for s in held}
        for slot in held:
            self.table.unpin(slot)
        return view
