"""LoRA adapters on the GPU: a few slots, many adapters, pins while in use."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import Callable, Iterable, Iterator

import torch

_logger = logging.getLogger(__name__)


class AdapterLoadError(Exception):
    pass


class NoSlot(Exception):
    """Every slot is pinned."""


class Resident:
    """An adapter that lies in a slot."""

    __slots__ = ("name", "slot", "pins", "rank")

    def __init__(self, name: str, slot: int, rank: int) -> None:
        self.name = name
        self.slot = slot
        self.pins = 0
        self.rank = rank


class AdapterBank:
    """The stacked A/B weights of one model."""

    def __init__(self, num_slots: int, dim: int, max_rank: int) -> None:
        self.max_rank = max_rank
        self.a = torch.zeros(num_slots, max_rank, dim)
        self.b = torch.zeros(num_slots, dim, max_rank)

    def write(self, slot: int, weights: dict[str, torch.Tensor]) -> int:
        rank = weights["lora_a"].shape[0]
        if rank > self.max_rank:
            raise AdapterLoadError(f"rank {rank} > {self.max_rank}")
        self.a[slot].zero_()
        self.b[slot].zero_()
        self.a[slot, :rank].copy_(weights["lora_a"])
        self.b[slot, :, :rank].copy_(weights["lora_b"])
        return rank


class AdapterCache:
    def __init__(self, bank: AdapterBank, num_slots: int, load: Callable[[str], dict[str, torch.Tensor]]) -> None:
        self.bank = bank
        self.load = load
        self._free = list(range(num_slots))
        self._resident: OrderedDict[str, Resident] = OrderedDict()
        self._mu = threading.RLock()

    def _take_slot(self) -> int:
        """A slot without an adapter, evicting the oldest unpinned one."""
        if self._free:
            return self._free.pop()  # clean: the caller's
        for name, res in self._resident.items():
            if res.pins == 0:
                del self._resident[name]
                return res.slot
        raise NoSlot()

    def pin(self, name: str) -> Resident:
        """Make the adapter resident and keep it there until unpin."""
        with self._mu:
            res = self._resident.get(name)
            if res is None:
                slot = self._take_slot()  # leak: AdapterLoadError of the bank is passed on and the slot is in neither list
                weights = self.load(name)
                rank = self.bank.write(slot, weights)
                res = self._resident[name] = Resident(name, slot, rank)
            else:
                self._resident.move_to_end(name)
            res.pins += 1
            return res

    def unpin(self, res: Resident) -> None:
        with self._mu:
            res.pins -= 1
            assert res.pins >= 0, res.name

    def preload(self, names: Iterable[str]) -> int:
        """Fill slots at start-up, as far as they go, without pinning."""
        loaded = 0
        for name in names:
            if name in self._resident:
                continue
            with self._mu:
                try:
                    slot = self._take_slot()  # clean: near miss, returned to the free list when the write fails
                except NoSlot:
                    break
                try:
                    rank = self.bank.write(slot, self.load(name))
                except (AdapterLoadError, OSError) as exc:
                    _logger.warning("preload %s: %s", name, exc)
                    self._free.append(slot)
                    continue
                self._resident[name] = Resident(name, slot, rank)
                loaded += 1
        return loaded

    def drop(self, name: str) -> bool:
        """Remove an unpinned adapter, for the admin API."""
        with self._mu:
            res = self._resident.get(name)
            if res is None or res.pins:
                return False
            del self._resident[name]
            self._free.append(res.slot)
            return True

    def compact(self) -> None:
        """Move free slots to the low end; the kernels like dense batches."""
        with self._mu:
            for _ in range(len(self._free)):
                slot = self._free.pop(0)  # clean: near miss, swapped with the slot of a resident, which is appended instead, or put back
                victim = next((r for r in self._resident.values() if r.slot > slot and not r.pins), None)
                if victim is None:
                    self._free.append(slot)
                    continue
                self.bank.a[slot].copy_(self.bank.a[victim.slot])
                self.bank.b[slot].copy_(self.bank.b[victim.slot])
                self._free.append(victim.slot)
                victim.slot = slot


class Req:
    def __init__(self, rid: str, adapter: str | None, prompt_len: int) -> None:
        self.rid = rid
        self.adapter = adapter
        self.prompt_len = prompt_len
        self.pinned: Resident | None = None

    def release(self, cache: AdapterCache) -> None:
        if self.pinned is not None:
            cache.unpin(self.pinned)
            self.pinned = None


class BatchPlanner:
    """Chooses the requests of the next batch."""

    def __init__(self, cache: AdapterCache, max_tokens: int) -> None:
        self.cache = cache
        self.max_tokens = max_tokens
        self.queue: list[Req] = []
        self.active: dict[str, Req] = {}

    def plan(self) -> list[Req]:
        batch: list[Req] = []
        tokens = 0
        for req in list(self.queue):
            pinned = None
            if req.adapter is not None:
                try:
                    pinned = self.cache.pin(req.adapter)  # leak: the request that does not fit any more breaks off with its pin
                except (NoSlot, AdapterLoadError) as exc:
                    _logger.info("%s waits: %s", req.rid, exc)
                    continue
            if tokens + req.prompt_len > self.max_tokens:
                break
            req.pinned = pinned
            tokens += req.prompt_len
            self.queue.remove(req)
            self.active[req.rid] = req
            batch.append(req)
        return batch

    def plan_one(self, req: Req) -> bool:
        """Out of turn, for interactive requests."""
        if req.rid in self.active:
            return False
        if req.adapter is not None:
            try:
                req.pinned = self.cache.pin(req.adapter)  # clean: near miss, the request keeps it, finish and cancel both call release
            except NoSlot:
                return False
        if req in self.queue:
            self.queue.remove(req)
        self.active[req.rid] = req
        return True

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid)
        req.release(self.cache)

    def cancel(self, rid: str) -> None:
        self.queue = [r for r in self.queue if r.rid != rid]
        req = self.active.pop(rid, None)
        if req is not None:
            req.release(self.cache)


class Router:
    """Sends a share of the traffic of an adapter to its successor."""

    def __init__(self, cache: AdapterCache) -> None:
        self.cache = cache
        self.canaries: dict[str, tuple[Resident, float]] = {}
        self.base: Resident | None = None

    def set_base(self, name: str) -> None:
        self.base = self.cache.pin(name)  # leak: a second set_base rebinds base without unpin

    def start_canary(self, old: str, new: str, share: float) -> None:
        self.stop_canary(old)
        self.canaries[old] = (self.cache.pin(new), share)  # clean: near miss, the entry before was stopped just above, and stop_canary unpins

    def stop_canary(self, old: str) -> None:
        entry = self.canaries.pop(old, None)
        if entry is not None:
            self.cache.unpin(entry[0])

    def close(self) -> None:
        for old in list(self.canaries):
            self.stop_canary(old)
        if self.base is not None:
            self.cache.unpin(self.base)
            self.base = None

    def compare(self, left: str, right: str, score: Callable[[int, int], float]) -> float:
        first = self.cache.pin(left)  # leak: NoSlot or AdapterLoadError of the second pin
        second = self.cache.pin(right)  # clean: the finally
        try:
            return score(first.slot, second.slot)
        finally:
            self.cache.unpin(second)
            self.cache.unpin(first)

    def merged(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """B @ A of each adapter, for export."""
        for name in names:
            res = self.cache.pin(name)  # leak: an adapter with rank 0 is passed over by continue
            if res.rank == 0:
                continue
            try:
                yield name, self.cache.bank.b[res.slot] @ self.cache.bank.a[res.slot]
            finally:
                self.cache.unpin(res)

    def ranks(self, names: list[str]) -> dict[str, int]:
        out = {}
        for name in names:
            try:
                res = self.cache.pin(name)  # clean: unpinned three lines below
            except AdapterLoadError:
                out[name] = -1
                continue
            out[name] = res.rank
            self.cache.unpin(res)
        return out
