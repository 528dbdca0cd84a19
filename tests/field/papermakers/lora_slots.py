"""Adapter slots for multi-LoRA batches.

The stacked A/B weights have a fixed number of slots on the device.  An adapter
is pinned while any running request uses it, and a slot is taken over from the
least recently used unpinned adapter when none is empty.
"""
from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, defaultdict

import torch

log = logging.getLogger("lora")

MAX_RANK = int(os.environ.get("LORA_MAX_RANK", "64"))


class SlotTable:
    def __init__(self, n: int):
        self.owner: list[str | None] = [None] * n
        self.lock = threading.RLock()

    def occupy(self, name: str) -> int | None:
        with self.lock:
            for idx, who in enumerate(self.owner):
                if who is None:
                    self.owner[idx] = name
                    return idx
        return None

    def vacate(self, idx: int) -> None:
        with self.lock:
            self.owner[idx] = None


class HostArena:
    """Pinned memory for adapter weights read from disk."""

    def __init__(self, nbytes: int):
        self.buf = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.segments: list[tuple[int, int]] = [(0, nbytes)]

    def carve(self, nbytes: int) -> tuple[int, int] | None:
        for i, (off, size) in enumerate(self.segments):
            if size >= nbytes:
                if size == nbytes:
                    self.segments.pop(i)  # clean: the exact segment is returned
                else:
                    self.segments[i] = (off + nbytes, size - nbytes)
                return off, nbytes
        return None

    def coalesce(self, seg: tuple[int, int]) -> None:
        self.segments.append(seg)
        self.segments.sort()
        merged: list[tuple[int, int]] = []
        for off, size in self.segments:
            if merged and sum(merged[-1]) == off:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((off, size))
        self.segments = merged

    def view(self, seg: tuple[int, int]) -> torch.Tensor:
        return self.buf[seg[0] : seg[0] + seg[1]]


class AdapterError(RuntimeError):
    pass


class AdapterManager:
    def __init__(self, table: SlotTable, arena: HostArena, loader):
        self.table = table
        self.arena = arena
        self.loader = loader
        self.resident: OrderedDict[str, int] = OrderedDict()
        self.pins: defaultdict[str, int] = defaultdict(int)
        self.staged: dict[str, tuple[int, int]] = {}

    def _evict_lru(self) -> bool:
        for name in self.resident:
            if self.pins[name] == 0:
                self.table.vacate(self.resident.pop(name))
                return True
        return False

    def prefetch(self, name: str) -> bool:
        if name in self.staged:
            return True
        size = self.loader.size_of(name)
        seg = self.arena.carve(size)  # clean: stored in staged, drop_staged coalesces it
        if seg is None:
            return False
        self.loader.read_into(name, self.arena.view(seg))
        self.staged[name] = seg
        return True

    def drop_staged(self) -> None:
        while self.staged:
            _, seg = self.staged.popitem()  # clean: coalesced right away
            self.arena.coalesce(seg)

    def activate(self, name: str) -> int:
        """Makes the adapter resident and returns its slot."""
        if name in self.resident:
            self.resident.move_to_end(name)
            return self.resident[name]
        slot = self.table.occupy(name)  # leak: slot stays owned when the rank check raises
        if slot is None:
            raise AdapterError("no slot")
        meta = self.loader.meta(name)
        if meta["rank"] > MAX_RANK:
            raise AdapterError(f"{name}: rank {meta['rank']} > {MAX_RANK}")
        self.loader.upload(slot, name)
        self.resident[name] = slot
        return slot

    def activate_with_eviction(self, name: str) -> int:
        if name in self.resident:
            return self.resident[name]
        slot = self.table.occupy(name)  # clean: near miss, None on the retry path and recorded in resident otherwise
        if slot is None:
            if not self._evict_lru():
                raise AdapterError("all adapters pinned")
            slot = self.table.occupy(name)  # clean: recorded in resident or vacated by the handler
            if slot is None:
                raise AdapterError("lost the race for a slot")
        try:
            self.loader.upload(slot, name)
        except OSError as exc:
            self.table.vacate(slot)
            raise AdapterError(name) from exc
        self.resident[name] = slot
        return slot

    def pin(self, name: str) -> bool:
        if name not in self.resident:
            return False
        self.pins[name] += 1
        return True

    def unpin(self, name: str) -> None:
        self.pins[name] -= 1

    def load_direct(self, name: str, slot: int) -> bool:
        """Disk to device through a short lived host segment."""
        seg = self.arena.carve(self.loader.size_of(name))  # leak: not coalesced when the checksum differs
        if seg is None:
            return False
        view = self.arena.view(seg)
        self.loader.read_into(name, view)
        if self.loader.checksum(name) != int(view.sum()):
            log.error("checksum of %s differs", name)
            return False
        self.loader.copy_to_slot(slot, view)
        self.arena.coalesce(seg)
        return True


class BatchBinder:
    """Pins adapters for the lifetime of a batch of requests."""

    def __init__(self, mgr: AdapterManager, max_per_batch: int):
        self.mgr = mgr
        self.max_per_batch = max_per_batch
        self.held: list[str] = []

    def bind(self, requests) -> list:
        accepted = []
        names: set[str] = set()
        for req in requests:
            if req.adapter is None:
                accepted.append(req)
                continue
            if not self.mgr.pin(req.adapter):  # leak: the pin of a request over the batch limit is not undone
                continue
            if req.adapter not in names and len(names) == self.max_per_batch:
                continue
            names.add(req.adapter)
            self.held.append(req.adapter)
            accepted.append(req)
        return accepted

    def unbind(self) -> None:
        for name in self.held:
            self.mgr.unpin(name)
        self.held.clear()

    def merge_pair(self, base: str, extra: str) -> bool:
        if not self.mgr.pin(base):  # leak: base stays pinned when extra is not resident
            return False
        if not self.mgr.pin(extra):  # clean: unpinned after the merge
            return False
        self.mgr.loader.merge(base, extra)
        self.mgr.unpin(extra)
        self.mgr.unpin(base)
        return True

    def rotate(self, order: list[str]) -> str | None:
        """Keep exactly one adapter of the A/B test pinned."""
        current = None
        for name in order:
            if not self.mgr.pin(name):  # clean: near miss, the previous pin is undone before current moves on
                continue
            if current is not None:
                self.mgr.unpin(current)
            current = name
        if current is not None:
            self.held.append(current)
        return current
