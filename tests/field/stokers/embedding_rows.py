from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np
import torch


@dataclass
class ShardFile:
    path: Path
    fd: int
    view: mmap.mmap


def open_shard(path: Path) -> Optional[ShardFile]:
    try:
        fd = os.open(path, os.O_RDONLY)  # clean: near miss, an empty file closes it, otherwise kept in the shard
    except FileNotFoundError:
        return None
    size = os.fstat(fd).st_size
    if size == 0:
        os.close(fd)
        return None
    return ShardFile(path, fd, mmap.mmap(fd, size, prot=mmap.PROT_READ))  # clean: closed by close_shard together with its descriptor


def close_shard(shard: ShardFile) -> None:
    shard.view.close()
    os.close(shard.fd)


class RowCache:
    """Device rows of an embedding table; pinned rows are not evicted."""

    def __init__(self, capacity: int, dim: int, device: torch.device) -> None:
        self.rows = torch.zeros(capacity, dim, device=device)
        self._slots: "OrderedDict[int, int]" = OrderedDict()
        self._vacant: List[int] = list(range(capacity))
        self._pins: Dict[int, int] = {}

    def pin(self, key: int) -> Optional[int]:
        """Slot of a cached row, pinned once more, or None."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        self._pins[key] = self._pins.get(key, 0) + 1
        self._slots.move_to_end(key)
        return slot

    def admit(self, key: int, value: torch.Tensor) -> Optional[int]:
        """Places a row and pins it."""
        slot = self._vacant.pop() if self._vacant else self._evict()
        if slot is None:
            return None
        self.rows[slot].copy_(value)
        self._slots[key] = slot
        self._pins[key] = 1
        return slot

    def unpin(self, key: int) -> None:
        left = self._pins[key] - 1
        if left:
            self._pins[key] = left
        else:
            del self._pins[key]

    def _evict(self) -> Optional[int]:
        for key in self._slots:
            if key not in self._pins:
                return self._slots.pop(key)
        return None


@dataclass
class Lookup:
    keys: List[int] = field(default_factory=list)
    slots: List[int] = field(default_factory=list)


class CachedTable:
    def __init__(self, root: Path, rows_per_shard: int, dim: int, cache: RowCache) -> None:
        self.root = root
        self.rows_per_shard = rows_per_shard
        self.dim = dim
        self.cache = cache
        self.shards: Dict[int, ShardFile] = {}
        self.hot: List[int] = []
        self.pending: Dict[int, Lookup] = {}

    def _shard(self, key: int) -> Optional[ShardFile]:
        number = key // self.rows_per_shard
        shard = self.shards.get(number)
        if shard is None:
            shard = open_shard(self.root / f"rows-{number:05d}.bin")  # clean: near miss, kept in the table, closed by close()
            if shard is not None:
                self.shards[number] = shard
        return shard

    def _row(self, shard: ShardFile, key: int) -> torch.Tensor:
        offset = (key % self.rows_per_shard) * self.dim * 4
        return torch.from_numpy(np.frombuffer(shard.view, np.float32, self.dim, offset).copy())

    def _fault(self, key: int) -> Optional[int]:
        slot = self.cache.pin(key)  # clean: handed on to the caller
        if slot is not None:
            return slot
        shard = self._shard(key)
        if shard is None:
            return None
        return self.cache.admit(key, self._row(shard, key))  # clean: handed on to the caller

    def begin(self, batch: int, keys: Iterable[int]) -> Optional[torch.Tensor]:
        look = Lookup()
        for key in keys:
            slot = self._fault(key)  # clean: near miss, a failing later key unpins all earlier ones, else kept in pending
            if slot is None:
                for done in look.keys:
                    self.cache.unpin(done)
                return None
            look.keys.append(key)
            look.slots.append(slot)
        self.pending[batch] = look
        return self.cache.rows[look.slots]

    def apply(self, batch: int, grads: torch.Tensor, lr: float) -> None:
        look = self.pending.pop(batch)
        self.cache.rows.index_add_(0, torch.tensor(look.slots), grads, alpha=-lr)
        for key in look.keys:
            self.cache.unpin(key)

    def discard(self, batch: int) -> None:
        look = self.pending.pop(batch, None)
        if look is not None:
            for key in look.keys:
                self.cache.unpin(key)

    def bag(self, keys: Sequence[int]) -> Optional[torch.Tensor]:
        total = torch.zeros(self.dim, device=self.cache.rows.device)
        for key in keys:
            slot = self._fault(key)  # leak: the pins are counted per occurrence but undone once per distinct key
            if slot is None:
                continue
            total += self.cache.rows[slot]
        for key in set(keys):
            if key in self.cache._pins:
                self.cache.unpin(key)
        return total

    def warm(self, counts: Dict[int, int], threshold: int) -> int:
        for key, count in counts.items():
            slot = self._fault(key)  # leak: rows under the threshold stay pinned without being listed as hot
            if slot is None:
                break
            if count < threshold:
                continue
            self.hot.append(key)
        return len(self.hot)

    def rewarm(self, keys: Sequence[int]) -> None:
        fresh: List[int] = []
        for key in keys:
            if self._fault(key) is not None:  # clean: near miss, listed in hot below and unpinned by cool
                fresh.append(key)
        self.cool()
        self.hot = fresh

    def cool(self) -> None:
        for key in self.hot:
            self.cache.unpin(key)
        self.hot = []

    def distance(self, a: int, b: int) -> Optional[float]:
        sa = self._fault(a)  # leak: stays pinned where the second row is absent
        sb = self._fault(b)  # clean: near miss, an absent first row unpins it
        if sa is None:
            if sb is not None:
                self.cache.unpin(b)
            return None
        if sb is None:
            return None
        value = (self.cache.rows[sa] - self.cache.rows[sb]).norm().item()
        self.cache.unpin(a)
        self.cache.unpin(b)
        return value

    def refresh(self, number: int) -> bool:
        fresh = open_shard(self.root / f"rows-{number:05d}.new")  # leak: it is not closed where the shard is not open yet
        if fresh is None:
            return False
        old = self.shards.get(number)
        if old is None:
            return False
        self.shards[number] = fresh
        close_shard(old)
        return True

    def verify(self, numbers: Iterable[int]) -> Tuple[int, int]:
        good = bad = 0
        for number in numbers:
            shard = open_shard(self.root / f"rows-{number:05d}.bin")  # clean: near miss, closed before either continuation
            if shard is None:
                bad += 1
                continue
            size = len(shard.view)
            close_shard(shard)
            if size != self.rows_per_shard * self.dim * 4:
                bad += 1
                continue
            good += 1
        return good, bad

    def close(self) -> None:
        self.cool()
        for batch in list(self.pending):
            self.discard(batch)
        for shard in self.shards.values():
            close_shard(shard)
        self.shards.clear()
