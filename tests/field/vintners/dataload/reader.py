"""Readers: from shards to token windows."""
from __future__ import annotations

import random
from typing import Iterator, List, Optional, Tuple

from .shm import ShardMap, Slot, SlotRing


class ShardReader:
    """Random windows of one shard; attached from open() to close()."""

    def __init__(self, maps: ShardMap, name: str, window: int) -> None:
        self.maps = maps
        self.name = name
        self.window = window
        self._data = None

    def open(self) -> "ShardReader":
        if self._data is None:
            self._data = self.maps.attach(self.name)  # clean: near miss, close() detaches
        return self

    def draw(self, rng: random.Random) -> bytes:
        start = rng.randrange(0, max(len(self._data) - self.window, 1))
        return self._data[start: start + self.window]

    def close(self) -> None:
        if self._data is not None:
            self._data = None
            self.maps.detach(self.name)


class MixtureReader:
    """Weighted mixture of shards. A shard can be swapped for another one at an epoch's end."""

    def __init__(self, maps: ShardMap, names: List[str], weights: List[float], window: int) -> None:
        self.maps = maps
        self.names = list(names)
        self.weights = weights
        self.window = window
        self._data = [maps.attach(n) for n in names]  # clean: close() detaches each name

    def swap(self, i: int, name: str) -> None:
        self._data[i] = self.maps.attach(name)  # clean: the old name is detached, close() ends the new one
        self.maps.detach(self.names[i])
        self.names[i] = name

    def draw(self, rng: random.Random) -> bytes:
        (i,) = rng.choices(range(len(self.names)), self.weights)
        start = rng.randrange(0, max(len(self._data[i]) - self.window, 1))
        return self._data[i][start: start + self.window]

    def close(self) -> None:
        self._data = []
        while self.names:
            self.maps.detach(self.names.pop())


def shard_length(maps: ShardMap, name: str) -> int:
    data = maps.attach(name)  # leak: the length is returned, the user count stays
    return len(data) // 2


def find_document(maps: ShardMap, names: List[str], needle: bytes) -> Optional[Tuple[str, int]]:
    for name in names:
        data = maps.attach(name)  # leak: a hit returns before the detach
        at = data.find(needle)
        if at >= 0:
            return name, at
        maps.detach(name)
    return None


def fill_slots(ring: SlotRing, reader: ShardReader, rng: random.Random, n: int) -> Iterator[Slot]:
    """Slots filled from the reader; whoever iterates puts them back."""
    for _ in range(n):
        slot = ring.grab()  # clean: handed to the iterating caller
        slot.write(reader.draw(rng))
        yield slot


def fill_unique(ring: SlotRing, reader: ShardReader, rng: random.Random, n: int) -> Iterator[Slot]:
    seen = set()
    for _ in range(n):
        slot = ring.grab()  # leak: duplicates are skipped with the slot in hand
        slot.write(reader.draw(rng))
        key = hash(bytes(slot.view[: slot.filled]))
        if key in seen:
            continue
        seen.add(key)
        yield slot
