"""LoRA adapter slots on the GPU with host-side weight references."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Iterable, Optional

logger = logging.getLogger(__name__)


@dataclass
class LoRARequest:
    request_id: str
    adapter: Optional[str]
    slot: int = -1
    prefetch: bool = False


class HostWeights:
    def __init__(self, load: Callable[[str], object]) -> None:
        self._load = load
        self._weights: dict[str, object] = {}
        self._refs: dict[str, int] = {}

    def pin(self, name: str) -> object:
        if name not in self._weights:
            self._weights[name] = self._load(name)
            self._refs[name] = 0
        self._refs[name] += 1
        return self._weights[name]

    def unpin(self, name: str) -> None:
        self._refs[name] -= 1
        if self._refs[name] == 0:
            del self._refs[name], self._weights[name]


class SlotTable:
    def __init__(self, n_slots: int) -> None:
        self.free: list[int] = list(range(n_slots))
        self.owner: dict[str, int] = {}
        self.users: dict[int, int] = {}
        self.idle: OrderedDict[str, int] = OrderedDict()

    def acquire(self, name: str) -> Optional[int]:
        slot = self.owner.get(name)
        if slot is None:
            slot = self._evict_or_pop()
            if slot is None:
                return None
            self.owner[name] = slot
            self.users[slot] = 0
        self.idle.pop(name, None)
        self.users[slot] += 1
        return slot

    def _evict_or_pop(self) -> Optional[int]:
        if self.free:
            return self.free.pop()
        if not self.idle:
            return None
        name, slot = self.idle.popitem(last=False)  # clean: near miss, the evicted slot is passed on to the new owner
        del self.owner[name]
        return slot

    def release(self, name: str) -> None:
        slot = self.owner[name]
        self.users[slot] -= 1
        if self.users[slot] == 0:
            self.idle[name] = slot

    def shrink(self, target: int) -> int:
        dropped = 0
        while self.idle and len(self.owner) > target:
            name, slot = self.idle.popitem(last=False)  # leak: the slot leaves idle and owner but never reaches free
            del self.owner[name]
            self.users.pop(slot, None)
            dropped += 1
        return dropped


class AdapterManager:
    def __init__(self, slots: SlotTable, host: HostWeights, upload: Callable[[int, object], bool]) -> None:
        self.slots = slots
        self.host = host
        self.upload = upload
        self.running: dict[str, LoRARequest] = {}
        self.static: set[str] = set()

    def activate(self, req: LoRARequest) -> bool:
        if req.adapter is None:
            self.running[req.request_id] = req
            return True
        weights = self.host.pin(req.adapter)  # leak: no slot free returns False with the host reference still held
        slot = self.slots.acquire(req.adapter)  # clean: near miss, released when the upload fails, otherwise by finish
        if slot is None:
            return False
        if not self.upload(slot, weights):
            self.slots.release(req.adapter)
            self.host.unpin(req.adapter)
            return False
        self.cancel_prefetch(req)
        req.slot = slot
        self.running[req.request_id] = req
        return True

    def finish(self, request_id: str) -> None:
        req = self.running.pop(request_id, None)
        if req is None or req.adapter is None:
            return
        self.slots.release(req.adapter)
        self.host.unpin(req.adapter)

    def add_static(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.static:
                continue
            if self.slots.acquire(name) is None:  # clean: near miss, the name in static owns it, remove_static releases
                logger.warning("no slot for static adapter %s", name)
                break
            self.static.add(name)

    def remove_static(self, name: str) -> bool:
        if name not in self.static:
            return False
        self.static.discard(name)
        self.slots.release(name)
        return True

    def prefetch(self, reqs: list[LoRARequest]) -> int:
        started = 0
        for req in reqs:
            if req.adapter is None or req.prefetch:
                continue
            slot = self.slots.acquire(req.adapter)  # leak: a failed upload continues without releasing the slot
            if slot is None:
                break
            weights = self.host.pin(req.adapter)  # clean: near miss, unpinned as soon as the upload has returned
            ok = self.upload(slot, weights)
            self.host.unpin(req.adapter)
            if not ok:
                continue
            req.prefetch = True
            started += 1
        return started

    def cancel_prefetch(self, req: LoRARequest) -> None:
        if req.prefetch and req.adapter is not None:
            self.slots.release(req.adapter)
            req.prefetch = False

    def rank_of(self, name: str) -> int:
        weights = self.host.pin(name)  # clean: near miss, unpinned in finally on every return
        try:
            if not hasattr(weights, "rank"):
                return 0
            return int(weights.rank)
        finally:
            self.host.unpin(name)

    def validate(self, names: list[str], max_rank: int) -> list[str]:
        bad: list[str] = []
        for name in names:
            weights = self.host.pin(name)  # leak: adapters within the limit are skipped with the reference held
            rank = getattr(weights, "rank", 0)
            if rank <= max_rank:
                continue
            bad.append(name)
            self.host.unpin(name)
        return bad

    def swap_adapter(self, request_id: str, new_name: str) -> bool:
        req = self.running[request_id]
        if req.adapter is None:
            return False
        slot = self.slots.acquire(new_name)  # clean: near miss, replaces the old adapter's hold which is released below
        if slot is None:
            return False
        weights = self.host.pin(new_name)  # clean: finish unpins it under the new name
        if not self.upload(slot, weights):
            self.host.unpin(new_name)
            self.slots.release(new_name)
            return False
        self.cancel_prefetch(req)
        self.slots.release(req.adapter)
        self.host.unpin(req.adapter)
        req.adapter, req.slot = new_name, slot
        return True
