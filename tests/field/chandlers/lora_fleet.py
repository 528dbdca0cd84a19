"""LoRA adapters: device slots, host copies and request pins across a fleet of replicas."""
from __future__ import annotations

import collections
import threading
import typing as t

import torch


class AdapterWeights(t.NamedTuple):
    name: str
    tensors: dict[str, torch.Tensor]


class HostShelf:
    """Pinned host copies of adapter weights, counted in bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def shelve(self, nbytes: int) -> bool:
        if self.used + nbytes > self.capacity:
            return False
        self.used += nbytes
        return True

    def unshelve(self, nbytes: int) -> None:
        self.used -= nbytes


class DeviceSlots:
    def __init__(self, count: int) -> None:
        self._empty = collections.deque(range(count))
        self._mutex = threading.Lock()

    def assign(self) -> int | None:
        with self._mutex:
            return self._empty.popleft() if self._empty else None

    def vacate(self, slot: int) -> None:
        with self._mutex:
            self._empty.append(slot)


class Resident:
    def __init__(self, name: str, slot: int, nbytes: int) -> None:
        self.name, self.slot, self.nbytes = name, slot, nbytes
        self.pins = 0


class LoraFleet:
    def __init__(self, shelf: HostShelf, slots: DeviceSlots, fetch: t.Callable[[str], AdapterWeights | None]) -> None:
        self.shelf = shelf
        self.slots = slots
        self.fetch = fetch
        self.residents: dict[str, Resident] = {}
        self.request_adapter: dict[str, Resident] = {}
        self.canaries: dict[str, int] = {}

    @staticmethod
    def _size(w: AdapterWeights) -> int:
        return sum(x.numel() * x.element_size() for x in w.tensors.values())

    def load(self, name: str) -> Resident | None:
        res = self.residents.get(name)
        if res is not None:
            return res
        weights = self.fetch(name)
        if weights is None:
            return None
        nbytes = self._size(weights)
        if not self.shelf.shelve(nbytes):  # leak: no device slot returns None with the bytes still counted
            return None
        slot = self.slots.assign()  # clean: kept by the resident, unload vacates it
        if slot is None:
            return None
        res = self.residents[name] = Resident(name, slot, nbytes)
        return res

    def unload(self, name: str) -> bool:
        res = self.residents.get(name)
        if res is None or res.pins:
            return False
        del self.residents[name]
        self.slots.vacate(res.slot)
        self.shelf.unshelve(res.nbytes)
        return True

    def pin(self, name: str) -> Resident | None:
        res = self.load(name)  # clean: the resident stays in self.residents until unload
        if res is not None:
            res.pins += 1
        return res

    def unpin(self, res: Resident) -> None:
        res.pins -= 1

    def begin(self, rid: str, name: str) -> bool:
        res = self.pin(name)  # clean: end() pops it from request_adapter and unpins
        if res is None:
            return False
        self.request_adapter[rid] = res
        return True

    def end(self, rid: str) -> None:
        res = self.request_adapter.pop(rid, None)
        if res is not None:
            self.unpin(res)

    def switch(self, rid: str, name: str) -> bool:
        res = self.pin(name)  # leak: the adapter pinned for the request so far is overwritten
        if res is None:
            return False
        self.request_adapter[rid] = res
        return True

    def switch_checked(self, rid: str, name: str) -> bool:
        res = self.pin(name)  # clean: near miss, end() unpins the former adapter before the table is set
        if res is None:
            return False
        self.end(rid)
        self.request_adapter[rid] = res
        return True

    def slots_for(self, names: t.Sequence[str]) -> list[int] | None:
        out: list[int] = []
        for name in names:
            res = self.pin(name)  # leak: only slot numbers leave the function, the pins have no owner
            if res is None:
                return None
            out.append(res.slot)
        return out

    def pin_batch(self, names: t.Sequence[str]) -> list[Resident] | None:
        held: list[Resident] = []
        for name in names:
            res = self.pin(name)  # clean: near miss, rolled back when one is missing, else returned to the caller
            if res is None:
                for h in held:
                    self.unpin(h)
                return None
            held.append(res)
        return held

    def run_batch(self, names: t.Sequence[str], step: t.Callable[[list[int]], None]) -> bool:
        held = self.pin_batch(names)  # clean: unpinned in finally
        if held is None:
            return False
        try:
            step([r.slot for r in held])
        finally:
            for r in held:
                self.unpin(r)
        return True

    def merge_batch(self, names: t.Sequence[str], weights: t.Sequence[float]) -> float:
        held = self.pin_batch(names)  # leak: a resident of weight zero is skipped and stays pinned
        if held is None:
            return 0.0
        total = 0.0
        for res, w in zip(held, weights, strict=True):
            if w == 0.0:
                continue
            total += w * res.nbytes
            self.unpin(res)
        return total

    def canary(self, name: str) -> bool:
        if name in self.canaries:
            return True
        slot = self.slots.assign()  # clean: near miss, retire_canary pops and vacates it
        if slot is None:
            return False
        self.canaries[name] = slot
        return True

    def retire_canary(self, name: str) -> None:
        slot = self.canaries.pop(name, None)
        if slot is not None:
            self.slots.vacate(slot)

    def recanary(self, name: str) -> int | None:
        slot = self.slots.assign()  # clean: near miss, the former slot is vacated by retire_canary in between
        if slot is None:
            return None
        self.retire_canary(name)
        self.canaries[name] = slot
        return slot

    def resize_shelf_for(self, name: str, nbytes: int) -> bool:
        res = self.residents[name]
        grow = nbytes - res.nbytes
        if grow <= 0:
            return True
        if not self.shelf.shelve(grow):  # leak: res.nbytes is not raised, so unload unshelves the former size
            return False
        return True
