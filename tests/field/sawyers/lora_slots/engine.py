"""Ties requests to adapters and adapters to GPU slots."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional

from .registry import AdapterRegistry, HostAdapter
from .slots import AdapterSlots


class LoadError(Exception):
    pass


@dataclass
class LoraRequest:
    rid: str
    name: str
    adapter: Optional[HostAdapter] = None
    cancelled: bool = False


Uploader = Callable[[HostAdapter, int], None]


class LoraEngine:
    def __init__(self, registry: AdapterRegistry, slots: AdapterSlots, upload: Uploader) -> None:
        self.registry = registry
        self.slots = slots
        self.upload = upload
        self.resident: dict[str, int] = {}
        self.live: dict[str, LoraRequest] = {}
        self.pinned: dict[str, int] = {}

    def submit(self, req: LoraRequest) -> bool:
        adapter = self.registry.incref(req.name)  # leak: kept when the slot cannot be made resident
        if adapter is None:
            return False
        if not self._make_resident(adapter):
            return False
        req.adapter = adapter
        self.live[req.rid] = req
        return True

    def finish(self, rid: str) -> None:
        req = self.live.pop(rid)
        if req.adapter is not None:
            self.registry.decref(req.adapter)

    def resubmit(self, req: LoraRequest) -> bool:
        if req.rid in self.live:
            return True
        adapter = self.registry.incref(req.name)  # clean: near miss, dropped again for a request that is cancelled
        if adapter is not None and req.cancelled:
            self.registry.decref(adapter)
            adapter = None
        if adapter is None:
            return False
        req.adapter = adapter
        self.live[req.rid] = req
        return True

    def _make_resident(self, adapter: HostAdapter) -> bool:
        if adapter.name in self.resident:
            return True
        slot = self.slots.try_activate(adapter.name)  # leak: an upload that fails is survived with the slot held
        if slot is None:
            return False
        try:
            self.upload(adapter, slot)
        except LoadError:
            return False
        self.resident[adapter.name] = slot
        return True

    def pin(self, name: str) -> bool:
        if name in self.pinned:
            return True
        adapter = self.registry.incref(name)  # clean: counted only for the length of the upload
        if adapter is None:
            return False
        slot = self.slots.try_activate(name)  # clean: kept in pinned, or given back when the upload fails
        ok = slot is not None
        if slot is not None:
            try:
                self.upload(adapter, slot)
            except LoadError:
                self.slots.deactivate(slot)
                ok = False
            else:
                self.pinned[name] = slot
        self.registry.decref(adapter)
        return ok

    def unpin(self, name: str) -> None:
        slot = self.pinned.pop(name, None)
        if slot is not None:
            self.slots.deactivate(slot)

    def evict(self, name: str) -> None:
        if name in self.resident:
            self.slots.deactivate(self.resident.pop(name))

    def evaluate(self, name: str, score: Callable[[int], float]) -> float:
        with self.slots.transient(name) as slot:  # clean: with statement
            return score(slot)

    def compare(self, first: str, second: str, score: Callable[[int], float]) -> Optional[str]:
        pair = self.slots.swap_pair(first, second)  # clean: both given back below
        if pair is None:
            return None
        left, right = (score(s) for s in pair)
        for slot in pair:
            self.slots.deactivate(slot)
        return first if left >= right else second
