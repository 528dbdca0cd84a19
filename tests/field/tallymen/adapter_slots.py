"""LoRA adapters in a fixed number of device slots."""
from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Iterator

import torch

LOG = logging.getLogger("adapters")


class AdapterError(Exception):
    """Anything that makes an adapter unusable for a request."""


class AdapterMissing(AdapterError):
    pass


class RankTooLarge(AdapterError):
    pass


class NoSlot(AdapterError):
    pass


@dataclass(eq=False)
class Slot:
    index: int
    adapter: str = ""
    users: int = 0
    stamp: float = 0.0


@dataclass
class AdapterWeights:
    rank: int
    tensors: dict[str, torch.Tensor]


@dataclass
class SlotBank:
    size: int
    _vacant: list[Slot] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self):
        self._vacant.extend(Slot(i) for i in range(self.size))

    def claim(self) -> Slot | None:
        with self._lock:
            if not self._vacant:
                return None
            slot = self._vacant.pop()  # clean: handed to the caller
            slot.users = 0
            slot.stamp = time.time()
            return slot

    def vacate(self, slot: Slot) -> None:
        with self._lock:
            slot.adapter = ""
            self._vacant.append(slot)


@dataclass
class AdapterStore:
    root: dict[str, AdapterWeights]

    def fetch(self, name: str) -> AdapterWeights:
        try:
            return self.root[name]
        except KeyError:
            raise AdapterMissing(name) from None


@dataclass
class AdapterManager:
    bank: SlotBank
    store: AdapterStore
    max_rank: int = 64
    resident: dict[str, Slot] = field(default_factory=dict)
    retiring: list[Slot] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def _make_room(self) -> Slot | None:
        slot = self.bank.claim()  # clean: returned when there is one
        if slot is not None:
            return slot
        idle = [s for s in self.resident.values() if s.users == 0]
        if not idle:
            return None
        victim = min(idle, key=lambda s: s.stamp)
        LOG.info("evicting %s from slot %d", victim.adapter, victim.index)
        del self.resident[victim.adapter]
        self.bank.vacate(victim)
        return self.bank.claim()  # clean: returned to the caller

    def _upload(self, slot: Slot, weights: AdapterWeights) -> None:
        for name, t in weights.tensors.items():
            LOG.debug("slot %d <- %s %s", slot.index, name, tuple(t.shape))

    def _load(self, name: str) -> None:
        slot = self._make_room()  # leak: fetch() raises AdapterMissing for an unknown name, the slot is in no table yet
        if slot is None:
            raise NoSlot(name)
        weights = self.store.fetch(name)
        if weights.rank > self.max_rank:
            self.bank.vacate(slot)
            raise RankTooLarge(f"{name}: rank {weights.rank}")
        self._upload(slot, weights)
        slot.adapter = name
        self.resident[name] = slot

    def pin(self, name: str) -> Slot:
        with self.lock:
            if name not in self.resident:
                self._load(name)
            slot = self.resident[name]
            slot.users += 1
            slot.stamp = time.time()
            return slot

    def unpin(self, slot: Slot) -> None:
        with self.lock:
            slot.users -= 1
            if slot.users == 0 and slot in self.retiring:
                self.retiring.remove(slot)
                self.bank.vacate(slot)

    def replace(self, name: str) -> bool:
        """Loads a newer version beside the old one and switches over."""
        with self.lock:
            fresh = self._make_room()  # clean: near miss, takes the old one's place in the table, the old one goes to the bank or retires
            if fresh is None:
                return False
            try:
                weights = self.store.fetch(name)
            except AdapterMissing:
                self.bank.vacate(fresh)
                return False
            self._upload(fresh, weights)
            fresh.adapter = name
            old = self.resident.get(name)
            self.resident[name] = fresh
            if old is not None:
                if old.users:
                    self.retiring.append(old)
                else:
                    self.bank.vacate(old)
            return True

    @contextlib.contextmanager
    def pinned(self, name: str) -> Iterator[Slot]:
        slot = self.pin(name)  # clean: unpinned in the finally
        try:
            yield slot
        finally:
            self.unpin(slot)


@dataclass
class AdapterRequest:
    adapter: str
    prompt: list[int]
    slot: Slot | None = None
    started: bool = False
    error: str | None = None

    def prepare(self, manager: AdapterManager) -> None:
        self.slot = manager.pin(self.adapter)  # leak: close() of a request that was prepared but never begun does not unpin

    def begin(self) -> None:
        self.started = True

    def close(self, manager: AdapterManager) -> None:
        if self.started:
            manager.unpin(self.slot)
            self.slot = None
            self.started = False


@dataclass
class Row:
    request: AdapterRequest
    slot: Slot


@dataclass
class Batch:
    rows: list[Row] = field(default_factory=list)

    def retire(self, manager: AdapterManager) -> None:
        for row in self.rows:
            manager.unpin(row.slot)
        self.rows.clear()


def build_batch(manager: AdapterManager, pending: list[AdapterRequest], budget: int):
    batch, later, tokens = Batch(), [], 0
    for req in pending:
        try:
            slot = manager.pin(req.adapter)  # leak: a request over the token budget is put off with its pin forgotten
        except AdapterError as exc:
            req.error = str(exc)
            continue
        if tokens + len(req.prompt) > budget:
            later.append(req)
            continue
        tokens += len(req.prompt)
        batch.rows.append(Row(req, slot))
    return batch, later


@dataclass
class Prefetcher:
    manager: AdapterManager
    warm: dict[str, Slot] = field(default_factory=dict)

    def hint(self, tenant: str, adapter: str) -> None:
        try:
            self.warm[tenant] = self.manager.pin(adapter)  # leak: the pin of the tenant's previous hint is overwritten
        except AdapterError:
            LOG.info("no prefetch of %s", adapter)

    def stop(self) -> None:
        for slot in self.warm.values():
            self.manager.unpin(slot)
        self.warm.clear()


@dataclass
class Runner:
    manager: AdapterManager
    executor: ThreadPoolExecutor
    forward: Callable[[Slot, list[int]], list[int]]

    def launch(self, req: AdapterRequest) -> Future:
        slot = self.manager.pin(req.adapter)  # clean: near miss, the done callback unpins whatever the outcome
        fut = self.executor.submit(self.forward, slot, req.prompt)
        fut.add_done_callback(lambda _f: self.manager.unpin(slot))
        return fut

    def score(self, adapter: str, prompt: list[int]) -> int:
        with self.manager.pinned(adapter) as slot:  # clean: left with the block
            return sum(self.forward(slot, prompt))

    def compare(self, base: str, tuned: str, prompt: list[int]) -> tuple[list[int], list[int]]:
        left = self.manager.pin(base)  # leak: pin() of the second adapter may raise while this one is held
        right = self.manager.pin(tuned)  # clean: the try begins right after
        try:
            return self.forward(left, prompt), self.forward(right, prompt)
        finally:
            self.manager.unpin(left)
            self.manager.unpin(right)
