"""Device slots for LoRA adapters in a multi-tenant server.

The weights of at most `capacity` adapters live on the device. A request pins the adapter that it uses for as
long as it runs; an adapter without pins may be evicted. Loading goes through a few staging areas in host memory.
"""
from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import torch

log = logging.getLogger(__name__)


class AdapterError(Exception):
    pass


@dataclass
class LoraSlot:
    index: int
    name: Optional[str] = None
    pins: int = 0
    last_use: float = 0.0
    rank: int = 0


@dataclass
class Staging:
    index: int
    host: torch.Tensor
    used: int = 0


@dataclass
class StagingAreas:
    count: int
    numel: int
    free: list[Staging] = field(default_factory=list)
    borrowed: int = 0

    def __post_init__(self):
        self.free = [Staging(i, torch.empty(self.numel)) for i in range(self.count)]

    def borrow(self) -> Staging:
        if not self.free:
            raise AdapterError("no staging area is free")
        area = self.free.pop()  # clean: handed to the caller
        self.borrowed += 1
        return area

    def hand_back(self, area: Staging) -> None:
        self.borrowed -= 1
        area.used = 0
        self.free.append(area)


@dataclass
class Request:
    rid: int
    adapter: Optional[str]
    tokens: int
    pinned: Optional[LoraSlot] = None
    started: bool = False
    output: list[int] = field(default_factory=list)


@dataclass
class AdapterStore:
    root: Path
    sizes: dict[str, int] = field(default_factory=dict)

    def read_into(self, name: str, area: Staging) -> int:
        """Fills the staging area and returns the rank of the adapter."""
        path = self.root / f"{name}.pt"
        if not path.exists():
            raise AdapterError(f"unknown adapter {name}")
        blob = torch.load(path, map_location="cpu")
        flat = torch.cat([t.reshape(-1) for t in blob["weights"]])
        if flat.numel() > area.host.numel():
            raise AdapterError(f"adapter {name} has {flat.numel()} weights, staging holds {area.host.numel()}")
        area.host[: flat.numel()].copy_(flat)
        area.used = flat.numel()
        self.sizes[name] = flat.numel()
        return int(blob["rank"])


@dataclass
class SlotTable:
    capacity: int
    numel: int
    store: AdapterStore
    staging: StagingAreas
    free: deque[LoraSlot] = field(default_factory=deque)
    by_name: dict[str, LoraSlot] = field(default_factory=dict)
    device: Optional[torch.Tensor] = None

    def __post_init__(self):
        self.free = deque(LoraSlot(i) for i in range(self.capacity))
        self.device = torch.zeros(self.capacity, self.numel)

    def _vacate(self) -> Optional[LoraSlot]:
        """A slot for a new adapter: an unused one, else the one that has been idle longest."""
        if self.free:
            return self.free.popleft()  # clean: handed to the caller
        idle = [s for s in self.by_name.values() if s.pins == 0]
        if not idle:
            return None
        victim = min(idle, key=lambda s: s.last_use)
        log.info("evicting %s", victim.name)
        return self.by_name.pop(victim.name)  # clean: handed to the caller

    def load(self, name: str) -> Optional[LoraSlot]:
        slot = self._vacate()  # leak: when read_into raises, pin handles it, the slot is in no list any more
        if slot is None:
            return None
        area = self.staging.borrow()  # clean: the finally gives it back when read_into raises
        try:
            slot.rank = self.store.read_into(name, area)
            self.device[slot.index, : area.used].copy_(area.host[: area.used])
        finally:
            self.staging.hand_back(area)
        slot.name = name
        self.by_name[name] = slot
        return slot

    def pin(self, name: str) -> Optional[LoraSlot]:
        """None where the adapter cannot be had right now."""
        slot = self.by_name.get(name)
        if slot is None:
            try:
                slot = self.load(name)  # clean: near miss, a loaded slot is in by_name, where eviction finds it
            except AdapterError as e:
                log.warning("%s", e)
                return None
        if slot is not None:
            slot.pins += 1
            slot.last_use = time.monotonic()
        return slot

    def unpin(self, slot: LoraSlot) -> None:
        slot.pins -= 1
        slot.last_use = time.monotonic()

    def retire(self, name: str) -> bool:
        """The tenant deleted the adapter."""
        slot = self.by_name.get(name)
        if slot is None or slot.pins:
            return False
        del self.by_name[name]
        slot.name = None
        self.free.append(slot)
        return True

    def preload(self, names: list[str]) -> int:
        """At start: several adapters through one staging area each, copied in one go."""
        work = []
        for name in names[: self.staging.count]:
            area = self.staging.borrow()  # leak: an unknown adapter is skipped with the area in hand
            try:
                rank = self.store.read_into(name, area)
            except AdapterError as e:
                log.warning("not preloaded: %s", e)
                continue
            work.append((name, rank, area))
        done = 0
        for name, rank, area in work:
            slot = None if name in self.by_name else self._vacate()  # clean: near miss, enters by_name, None means that there was none
            if slot is not None:
                self.device[slot.index, : area.used].copy_(area.host[: area.used])
                slot.name, slot.rank = name, rank
                self.by_name[name] = slot
                done += 1
            self.staging.hand_back(area)
        return done


@dataclass
class Batcher:
    table: SlotTable
    max_batch: int = 32
    queue: deque[Request] = field(default_factory=deque)
    running: dict[int, Request] = field(default_factory=dict)
    rejected: list[int] = field(default_factory=list)

    def submit(self, req: Request) -> None:
        if req.adapter:
            req.pinned = self.table.pin(req.adapter)  # leak: cancel() of a queued request unpins only started ones
            if req.pinned is None:
                self.rejected.append(req.rid)
                return
        self.queue.append(req)

    def schedule(self) -> list[Request]:
        batch = list(self.running.values())
        while self.queue and len(batch) < self.max_batch:
            req = self.queue.popleft()
            req.started = True
            self.running[req.rid] = req
            batch.append(req)
        return batch

    def finish(self, rid: int) -> None:
        req = self.running.pop(rid)
        if req.pinned is not None:
            self.table.unpin(req.pinned)
            req.pinned = None

    def cancel(self, rid: int) -> bool:
        if rid in self.running:
            self.finish(rid)
            return True
        for req in self.queue:
            if req.rid == rid:
                self.queue.remove(req)
                if req.started and req.pinned is not None:
                    self.table.unpin(req.pinned)
                return True
        return False

    def switch_adapter(self, rid: int, name: str) -> bool:
        """The tenant rolled out a new version: a running request goes on with it."""
        req = self.running.get(rid)
        if req is None:
            return False
        slot = self.table.pin(name)  # clean: near miss, becomes req.pinned, finish() unpins it
        if slot is None:
            return False
        if req.pinned is not None:
            self.table.unpin(req.pinned)
        req.pinned = slot
        return True


def compare_adapters(table: SlotTable, a: str, b: str) -> Optional[float]:
    """Cosine between two adapters, for the admin page."""
    left = table.pin(a)  # leak: stays pinned when b cannot be had
    if left is None:
        return None
    right = table.pin(b)  # leak: different ranks return before the unpins
    if right is None:
        return None
    if left.rank != right.rank:
        return 0.0
    cos = torch.nn.functional.cosine_similarity(table.device[left.index], table.device[right.index], dim=0)
    table.unpin(left)
    table.unpin(right)
    return float(cos)


def touch_all(table: SlotTable, names: list[str]) -> None:
    for name in names:
        slot = table.pin(name)  # clean: unpinned at once, None is skipped
        if slot is not None:
            table.unpin(slot)
