"""Adapter slots on the device: load on demand, pin while requests run, merge and unmerge."""
from __future__ import annotations

import logging
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class AdapterBank:
    """Stacked A/B weights; one slot holds one adapter."""

    def __init__(self, slots: int, rank: int, dim: int, device: str) -> None:
        self.a = torch.zeros(slots, rank, dim, device=device)
        self.b = torch.zeros(slots, dim, rank, device=device)
        self._vacant = set(range(slots))

    def reserve(self) -> Optional[int]:
        return self._vacant.pop() if self._vacant else None

    def cancel(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()
        self._vacant.add(slot)


class Adapter:
    def __init__(self, name: str, slot: int) -> None:
        self.name = name
        self.slot = slot
        self.pins = 0


class LoraManager:
    def __init__(self, bank: AdapterBank, load: Callable[[str], Dict[str, torch.Tensor]]) -> None:
        self.bank = bank
        self.load = load
        self.adapters: Dict[str, Adapter] = {}
        self.lock = threading.RLock()
        self.merge_lock = threading.Lock()
        self.by_request: Dict[str, Adapter] = {}

    def _fill(self, slot: int, weights: Dict[str, torch.Tensor]) -> None:
        self.bank.a[slot].copy_(weights["a"])
        self.bank.b[slot].copy_(weights["b"])

    def _make_room(self) -> Optional[int]:
        slot = self.bank.reserve()  # clean: returned to the caller
        if slot is not None:
            return slot
        for name, adapter in list(self.adapters.items()):
            if adapter.pins == 0:
                del self.adapters[name]
                return adapter.slot
        return None

    def activate(self, name: str) -> Optional[Adapter]:
        with self.lock:
            adapter = self.adapters.get(name)
            if adapter is None:
                slot = self._make_room()  # leak: a missing file is answered with None while the slot is reserved
                if slot is None:
                    return None
                try:
                    self._fill(slot, self.load(name))
                except FileNotFoundError:
                    logger.warning("adapter %s not found", name)
                    return None
                adapter = self.adapters[name] = Adapter(name, slot)
            adapter.pins += 1
            return adapter

    def deactivate(self, adapter: Adapter) -> None:
        with self.lock:
            adapter.pins -= 1

    def install(self, name: str, weights: Dict[str, torch.Tensor]) -> bool:
        with self.lock:
            if name in self.adapters:
                return False
            slot = self._make_room()  # clean: near miss, cancelled when shapes differ, else the adapter's
            if slot is None:
                return False
            if weights["a"].shape != self.bank.a[slot].shape:
                self.bank.cancel(slot)
                return False
            self._fill(slot, weights)
            self.adapters[name] = Adapter(name, slot)
            return True

    def replace(self, name: str, weights: Dict[str, torch.Tensor]) -> bool:
        with self.lock:
            slot = self.bank.reserve()  # leak: the adapter's earlier slot is written over and not cancelled
            if slot is None:
                return False
            old = self.adapters.get(name)
            if old is None:
                self.bank.cancel(slot)
                return False
            self._fill(slot, weights)
            old.slot = slot
            return True

    def uninstall(self, name: str) -> bool:
        with self.lock:
            adapter = self.adapters.get(name)
            if adapter is None or adapter.pins:
                return False
            del self.adapters[name]
            self.bank.cancel(adapter.slot)
            return True

    def begin(self, request_id: str, name: Optional[str]) -> bool:
        if name is None:
            return True
        adapter = self.activate(name)  # clean: near miss, held by request until end, requests without adapter hold none
        if adapter is None:
            return False
        self.by_request[request_id] = adapter
        return True

    def end(self, request_id: str) -> None:
        adapter = self.by_request.pop(request_id, None)
        if adapter is not None:
            self.deactivate(adapter)

    def begin_group(self, names: List[str]) -> List[Adapter]:
        group: List[Adapter] = []
        for name in names:
            adapter = self.activate(name)  # clean: near miss, an incomplete group is deactivated as a whole
            if adapter is None:
                self.end_group(group)
                return []
            group.append(adapter)
        return group

    def end_group(self, group: List[Adapter]) -> None:
        while group:
            self.deactivate(group.pop())

    def run_group(self, names: List[str], x: torch.Tensor) -> Optional[torch.Tensor]:
        group = self.begin_group(names)  # clean: ended in the finally, an empty one has nothing
        if not group:
            return None
        try:
            return sum(self.bank.b[g.slot] @ (self.bank.a[g.slot] @ x) for g in group)
        finally:
            self.end_group(group)

    def delta_norm(self, name: str, scale: float) -> float:
        adapter = self.activate(name)  # leak: with a scale of zero the pin is not taken off
        if adapter is None or scale == 0.0:
            return 0.0
        norm = float((self.bank.b[adapter.slot] @ self.bank.a[adapter.slot]).norm())
        self.deactivate(adapter)
        return norm * scale

    def merge_into(self, name: str, weight: torch.Tensor) -> bool:
        if not self.merge_lock.acquire(blocking=False):  # leak: an unknown adapter returns with the merge lock held
            return False
        adapter = self.activate(name)  # clean: None upon the early return, else deactivated
        if adapter is None:
            return False
        weight += self.bank.b[adapter.slot] @ self.bank.a[adapter.slot]
        self.deactivate(adapter)
        self.merge_lock.release()
        return True

    def unmerge_from(self, name: str, weight: torch.Tensor) -> bool:
        if not self.merge_lock.acquire(timeout=5.0):  # clean: near miss, a lock not got is not released, the finally does the rest
            return False
        try:
            adapter = self.adapters.get(name)
            if adapter is None:
                return False
            weight -= self.bank.b[adapter.slot] @ self.bank.a[adapter.slot]
            return True
        finally:
            self.merge_lock.release()
