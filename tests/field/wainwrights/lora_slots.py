"""Device slots for LoRA adapters in a multi-tenant server.

There are a few hundred adapters on disk, some dozens in host memory and `n_slots` on the device.  A slot is pinned
while a batch uses it.  Unpinned slots stay loaded and are reclaimed in LRU order.
"""
from __future__ import annotations

import dataclasses
import enum
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, Iterator, Optional, Sequence

import torch
from safetensors import safe_open

log = logging.getLogger(__name__)


class AdapterMissing(LookupError):
    pass


class AdapterBroken(ValueError):
    pass


class NoSlot(RuntimeError):
    pass


class Phase(enum.Enum):
    EMPTY = "empty"
    LOADED = "loaded"


@dataclass
class Slot:
    number: int
    rank: int = 0
    adapter: Optional[str] = None
    phase: Phase = Phase.EMPTY
    pins: int = 0
    last_used: float = 0.0


@dataclass
class Request:
    rid: int
    adapter: Optional[str]
    tokens: list[int]
    slot: Optional[Slot] = None
    error: Optional[str] = None


@dataclass
class Batch:
    requests: list[Request] = field(default_factory=list)
    pinned: dict[str, Slot] = field(default_factory=dict)

    def index_tensor(self) -> torch.Tensor:
        return torch.tensor([r.slot.number if r.slot else -1 for r in self.requests])


@dataclass
class SlotTable:
    root: Path
    n_slots: int
    max_rank: int
    free: list[Slot] = field(default_factory=list)
    loaded: OrderedDict[str, Slot] = field(default_factory=OrderedDict)
    stale: list[Slot] = field(default_factory=list)
    weights: Optional[torch.Tensor] = None

    def __post_init__(self) -> None:
        self.free = [Slot(i) for i in reversed(range(self.n_slots))]
        self.weights = torch.zeros(self.n_slots, self.max_rank, 4096)

    def _take_slot(self) -> Slot:
        if self.free:
            return self.free.pop()  # clean: returned
        for name, slot in self.loaded.items():
            if slot.pins == 0:
                del self.loaded[name]
                return dataclasses.replace(slot, adapter=None, phase=Phase.EMPTY)  # clean: the reclaimed slot goes to the caller
        raise NoSlot(f"all {self.n_slots} slots pinned")

    def _give_slot(self, slot: Slot) -> None:
        slot.adapter, slot.phase, slot.rank = None, Phase.EMPTY, 0
        self.free.append(slot)

    def _read(self, name: str) -> tuple[int, torch.Tensor]:
        path = self.root / f"{name}.safetensors"
        if not path.exists():
            raise AdapterMissing(name)
        with safe_open(path, framework="pt") as f:  # clean: with
            lora_a = f.get_tensor("lora_A.weight")
        if lora_a.shape[0] > self.max_rank:
            raise AdapterBroken(f"{name}: rank {lora_a.shape[0]} over {self.max_rank}")
        return lora_a.shape[0], lora_a

    def _load(self, name: str) -> Slot:
        slot = self._take_slot()  # leak: AdapterBroken from _read is not AdapterMissing, and the slot is in no list then
        try:
            slot.rank, lora_a = self._read(name)
        except AdapterMissing:
            self._give_slot(slot)
            raise
        self.weights[slot.number, : slot.rank].copy_(lora_a)
        slot.adapter, slot.phase = name, Phase.LOADED
        self.loaded[name] = slot
        return slot

    def reload(self, name: str) -> Optional[Slot]:
        rank, lora_a = self._read(name)
        fresh = self._take_slot()  # leak: a version with another rank is refused after the slot was taken
        old = self.loaded.get(name)
        if old is not None and old.rank != rank:
            return None
        if old is not None:
            del self.loaded[name]
            if old.pins:
                self.stale.append(old)
            else:
                self._give_slot(old)
        self.weights[fresh.number, :rank].copy_(lora_a)
        fresh.adapter, fresh.phase, fresh.rank = name, Phase.LOADED, rank
        self.loaded[name] = fresh
        return fresh

    def reserve_scratch(self, how_many: int) -> Optional[list[Slot]]:
        taken: list[Slot] = []
        try:
            while len(taken) < how_many:
                taken.append(self._take_slot())  # clean: near miss, the handler gives back what was taken before NoSlot
        except NoSlot:
            for slot in taken:
                self._give_slot(slot)
            return None
        return taken

    def pin(self, name: str) -> Slot:
        slot = self.loaded.get(name)
        if slot is None:
            slot = self._load(name)  # clean: it stays in loaded, and is reclaimed there or by reload() and unpin()
        slot.pins += 1
        slot.last_used = time.monotonic()
        if name in self.loaded:
            self.loaded.move_to_end(name)
        return slot

    def unpin(self, slot: Slot) -> None:
        if slot.pins <= 0:
            raise RuntimeError(f"slot {slot.number} is not pinned")
        slot.pins -= 1
        if slot.pins == 0 and slot in self.stale:
            self.stale.remove(slot)
            self._give_slot(slot)


class Batcher:
    def __init__(self, table: SlotTable, max_batch: int, max_adapters: int) -> None:
        self.table = table
        self.max_batch = max_batch
        self.max_adapters = max_adapters
        self.deferred: list[Request] = []

    def form(self, queue: list[Request]) -> Batch:
        batch = Batch()
        while queue and len(batch.requests) < self.max_batch:
            req = queue.pop(0)
            if req.adapter is None or req.adapter in batch.pinned:
                req.slot = batch.pinned.get(req.adapter) if req.adapter else None
                batch.requests.append(req)
                continue
            if len(batch.pinned) >= self.max_adapters:
                self.deferred.append(req)
                continue
            try:
                slot = self.table.pin(req.adapter)  # clean: near miss, batch.pinned holds it until retire()
            except NoSlot:
                self.deferred.append(req)
                break
            except (AdapterMissing, AdapterBroken) as exc:
                req.error = str(exc)
                continue
            req.slot = batch.pinned[req.adapter] = slot
            batch.requests.append(req)
        queue[:0], self.deferred = self.deferred, []
        return batch

    def retire(self, batch: Batch) -> None:
        for slot in batch.pinned.values():
            self.table.unpin(slot)
        batch.pinned.clear()
        for req in batch.requests:
            req.slot = None

    def _likelihood(self, model, req: Request, slot: Slot) -> float:
        ll = float(model.log_likelihood(req.tokens, slot.number))
        if ll != ll:
            raise AdapterBroken(f"request {req.rid}: NaN under {slot.adapter}")
        return ll

    def score(self, model, req: Request, candidates: Sequence[str]) -> Optional[str]:
        best, best_ll = None, float("-inf")
        for name in candidates:
            slot = self.table.pin(name)  # leak: AdapterBroken of _likelihood() ends the loop with the pin held
            try:
                ll = self._likelihood(model, req, slot)
            except AdapterBroken:
                break
            if ll > best_ll:
                best, best_ll = name, ll
            self.table.unpin(slot)
        return best

    def merged(self, model, names: Sequence[str], weights: Sequence[float]) -> bool:
        scratch = self.table.reserve_scratch(1)  # clean: None is refused and the finally gives the list back
        if scratch is None:
            return False
        held: dict[str, Slot] = {}
        try:
            for name in names:
                held[name] = self.table.pin(name)  # leak: a name that comes twice is pinned twice and unpinned once
            out = self.table.weights[scratch[0].number].zero_()
            for name, w in zip(names, weights):
                out.add_(self.table.weights[held[name].number], alpha=w)
            model.generate_with(scratch[0].number)
        finally:
            for slot in held.values():
                self.table.unpin(slot)
            for slot in scratch:
                self.table._give_slot(slot)
        return True


def preload(table: SlotTable, names: Iterable[str], keep: bool) -> dict[str, Slot]:
    """Touch adapters ahead of traffic.  With keep they stay pinned, and the caller unpins them."""
    kept: dict[str, Slot] = {}
    for name in dict.fromkeys(names):
        slot = table.pin(name)  # leak: an adapter that is missing raises in a later round and kept is lost with the frame
        if keep:
            kept[name] = slot
        else:
            table.unpin(slot)
    return kept


def warm_pages(table: SlotTable, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    for name in names:
        slot = table.pin(name)  # clean: near miss, a consumer that stops closes the generator and runs the finally
        try:
            yield name, slot.rank
        finally:
            table.unpin(slot)
