"""Device cache of embedding rows in front of a host table.

Slots are numbered rows of one big tensor.  `SlotMap` hands out slot numbers from a
bitmap; `EmbeddingCache` maps keys to slots and pins those a forward pass is using.
"""
from __future__ import annotations

from collections import OrderedDict
from typing import Iterator, Sequence

import torch

NO_SLOT = -1


class SlotMap:
    def __init__(self, nslots: int) -> None:
        self.nslots = nslots
        self._used = bytearray(nslots)
        self._hint = 0
        self.nfree = nslots

    def claim(self) -> int:
        i = self._used.find(0, self._hint)
        if i < 0:
            i = self._used.find(0, 0, self._hint)
        if i < 0:
            return NO_SLOT
        self._used[i] = 1
        self.nfree -= 1
        self._hint = i + 1
        return i

    def claim_run(self, n: int) -> range | None:
        """n neighbouring slots, so that the upload is one copy."""
        i = self._used.find(bytes(n))
        if i < 0:
            return None
        self._used[i : i + n] = b"\x01" * n
        self.nfree -= n
        return range(i, i + n)

    def unclaim(self, slot: int) -> None:
        self._used[slot] = 0
        self.nfree += 1
        self._hint = min(self._hint, slot)

    def unclaim_run(self, run: Sequence[int]) -> None:
        for s in run:
            self.unclaim(s)


class EmbeddingCache:
    def __init__(self, host: torch.Tensor, nslots: int, device: torch.device) -> None:
        self.host = host
        self.rows = torch.empty(nslots, host.shape[1], device=device)
        self.slots = SlotMap(nslots)
        self.where: OrderedDict[int, int] = OrderedDict()
        self.pins: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.patched: dict[int, int] = {}

    # ---- eviction ----
    def _evict_one(self) -> bool:
        for key in self.where:
            if self.pins.get(key, 0) == 0:
                self.slots.unclaim(self.where.pop(key))
                return True
        return False

    def forget(self, key: int) -> None:
        if self.pins.get(key):
            raise RuntimeError(f"{key} is pinned")
        slot = self.where.pop(key, None)
        if slot is not None:
            self.slots.unclaim(slot)

    def clear(self) -> None:
        while self.where:
            _, slot = self.where.popitem()
            self.slots.unclaim(slot)
        for slot in self.patched.values():
            self.slots.unclaim(slot)
        self.patched.clear()

    # ---- admission ----
    def admit(self, key: int) -> int:
        if key in self.where:
            self.where.move_to_end(key)
            return self.where[key]
        slot = self.slots.claim()  # clean: entered in self.where, or none and the loop is entered
        while slot == NO_SLOT:
            if not self._evict_one():
                return NO_SLOT
            slot = self.slots.claim()  # clean: entered in self.where below
        self.rows[slot].copy_(self.host[key], non_blocking=True)
        self.where[key] = slot
        return slot

    def admit_checked(self, key: int, version: int) -> int:
        slot = self.slots.claim()  # leak: not unclaimed when the cached version is newer
        if slot == NO_SLOT:
            return NO_SLOT
        if self.versions.get(key, -1) >= version:
            return self.where.get(key, NO_SLOT)
        old = self.where.pop(key, None)
        if old is not None:
            self.slots.unclaim(old)
        self.rows[slot].copy_(self.host[key])
        self.where[key] = slot
        self.versions[key] = version
        return slot

    def admit_block(self, keys: list[int]) -> bool:
        run = self.slots.claim_run(len(keys))  # leak: the slot of a key that is cached already is skipped for good
        if run is None:
            return False
        for key, slot in zip(keys, run):
            if key in self.where:
                continue
            self.rows[slot].copy_(self.host[key])
            self.where[key] = slot
        return True

    def admit_block_fresh(self, keys: list[int]) -> bool:
        run = self.slots.claim_run(len(keys))  # clean: near miss, slots of keys cached already are unclaimed
        if run is None:
            return False
        for key, slot in zip(keys, run):
            if key in self.where:
                self.slots.unclaim(slot)
            else:
                self.rows[slot].copy_(self.host[key])
                self.where[key] = slot
        return True

    def patch(self, key: int, row: torch.Tensor) -> None:
        slot = self.slots.claim()  # leak: a second patch of the key overwrites the first one's slot
        if slot == NO_SLOT:
            raise RuntimeError("cache full")
        self.rows[slot].copy_(row)
        self.patched[key] = slot

    # ---- pins ----
    def pin(self, key: int) -> bool:
        if self.admit(key) == NO_SLOT:  # clean: the slot stays in self.where
            return False
        self.pins[key] = self.pins.get(key, 0) + 1
        return True

    def unpin(self, key: int) -> None:
        left = self.pins[key] - 1
        if left:
            self.pins[key] = left
        else:
            del self.pins[key]


class PinnedLookup:
    """Pins a batch's keys for the length of a forward pass."""

    def __init__(self, cache: EmbeddingCache) -> None:
        self.cache = cache

    def gather(self, keys: list[int]) -> torch.Tensor | None:
        pinned: list[int] = []
        try:
            for k in keys:
                if not self.cache.pin(k):  # clean: all pinned keys are unpinned in finally
                    return None
                pinned.append(k)
            idx = [self.cache.where[k] for k in keys]
            return self.cache.rows[idx]
        finally:
            for k in pinned:
                self.cache.unpin(k)

    def gather_known(self, keys: list[int]) -> torch.Tensor | None:
        for k in keys:
            if not self.cache.pin(k):  # leak: keys pinned before a failure stay pinned
                return None
        idx = [self.cache.where[k] for k in keys]
        out = self.cache.rows[idx].clone()
        for k in keys:
            self.cache.unpin(k)
        return out

    def batches(self, stream: Iterator[list[int]]) -> Iterator[torch.Tensor]:
        for keys in stream:
            done = []
            for k in keys:
                if self.cache.pin(k):  # clean: unpinned in the finally around the yield
                    done.append(k)
            try:
                yield self.cache.rows[[self.cache.where[k] for k in done]]
            finally:
                for k in done:
                    self.cache.unpin(k)

    def norms(self, keys: list[int]) -> dict[int, float]:
        out: dict[int, float] = {}
        for k in keys:
            if not self.cache.pin(k):  # leak: continue on a zero row skips unpin
                continue
            norm = self.cache.rows[self.cache.where[k]].norm().item()
            if norm == 0.0:
                continue
            out[k] = norm
            self.cache.unpin(k)
        return out


class ScratchRows:
    """Slots outside the key map, for rows computed on the fly."""

    def __init__(self, cache: EmbeddingCache) -> None:
        self.cache = cache
        self.mine: list[int] = []

    def add(self, row: torch.Tensor) -> int:
        slot = self.cache.slots.claim()  # clean: near miss, kept in self.mine which drop() empties
        if slot != NO_SLOT:
            self.mine.append(slot)
            self.cache.rows[slot].copy_(row)
        return slot

    def mean_of(self, rows: list[torch.Tensor]) -> torch.Tensor | None:
        run = self.cache.slots.claim_run(len(rows))  # clean: unclaimed after the mean
        if run is None:
            return None
        block = self.cache.rows[run.start : run.stop]
        torch.stack(rows, out=block)
        mean = block.mean(0)
        self.cache.slots.unclaim_run(run)
        return mean

    def drop(self) -> None:
        while self.mine:
            self.cache.slots.unclaim(self.mine.pop())
