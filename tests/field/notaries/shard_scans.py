"""Shard readers: read slots behind generators, context managers and exit stacks."""
from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import Iterator


class ReadSlots:
    """Slot numbers 0..n-1; one per shard that is being read."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._owner: dict[int, str] = {}
        self._cond = threading.Condition()

    def occupy(self, owner: str) -> int:
        with self._cond:
            while not self._free:
                self._cond.wait()
            slot = self._free.pop(0)
            self._owner[slot] = owner
            return slot

    def leave(self, slot: int) -> None:
        with self._cond:
            self._owner.pop(slot, None)
            self._free.append(slot)
            self._cond.notify()


class ShardStore:
    def __init__(self, shards: dict[str, list[bytes]]) -> None:
        self._shards = shards

    def read(self, name: str, slot: int) -> list[bytes]:
        return list(self._shards[name])

    def names(self) -> list[str]:
        return sorted(self._shards)


@contextmanager
def reading(slots: ReadSlots, name: str) -> Iterator[int]:
    slot = slots.occupy(name)  # clean: left in finally
    try:
        yield slot
    finally:
        slots.leave(slot)


@contextmanager
def sampled_read(slots: ReadSlots, name: str, rate: float, draw: float) -> Iterator[int | None]:
    slot = slots.occupy(name)  # leak: the unsampled way yields None and returns without leaving
    if draw >= rate:
        yield None
        return
    try:
        yield slot
    finally:
        slots.leave(slot)


@contextmanager
def optional_read(slots: ReadSlots, name: str, wanted: bool) -> Iterator[int | None]:
    slot = slots.occupy(name) if wanted else None  # clean: near miss, both guards test the same flag
    try:
        yield slot
    finally:
        if wanted:
            slots.leave(slot)


def scan_limited(store: ShardStore, slots: ReadSlots, name: str, limit: int) -> Iterator[bytes]:
    slot = slots.occupy(name)  # leak: return at the limit goes past leave()
    for count, record in enumerate(store.read(name, slot)):
        if count >= limit:
            return
        yield record
    slots.leave(slot)


def scan_until(store: ShardStore, slots: ReadSlots, name: str, marker: bytes) -> Iterator[bytes]:
    slot = slots.occupy(name)  # clean: near miss, finally runs on the early return too
    try:
        for record in store.read(name, slot):
            if record == marker:
                return
            yield record
    finally:
        slots.leave(slot)


def held_slots(slots: ReadSlots, names: list[str]) -> Iterator[tuple[str, int]]:
    """Yields a slot per shard; whoever iterates leaves it."""
    for name in names:
        slot = slots.occupy(name)  # clean: handed to the consumer
        yield name, slot


def shard_sizes(store: ShardStore, slots: ReadSlots) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, slot in held_slots(slots, store.names()):  # clean: near miss, empty shards leave as well
        records = store.read(name, slot)
        slots.leave(slot)
        if not records:
            continue
        sizes[name] = sum(map(len, records))
    return sizes


def longest_record(store: ShardStore, slots: ReadSlots) -> int:
    best = 0
    for name, slot in held_slots(slots, store.names()):  # leak: an empty shard continues without leave()
        records = store.read(name, slot)
        if not records:
            continue
        best = max(best, max(map(len, records)))
        slots.leave(slot)
    return best


class MergeReader:
    """Reads several shards at once; the slots are kept on an exit stack until close()."""

    def __init__(self, store: ShardStore, slots: ReadSlots) -> None:
        self.store = store
        self.slots = slots
        self._stack: ExitStack | None = None
        self._open: list[tuple[str, int]] = []

    def open(self, names: list[str], need: int) -> bool:
        with ExitStack() as stack:
            for name in names:
                slot = self.slots.occupy(name)  # clean: near miss, on the stack; kept for close() by pop_all
                stack.callback(self.slots.leave, slot)
                self._open.append((name, slot))
            if len(self._open) < need:
                self._open.clear()
                return False
            self._stack = stack.pop_all()
        return True

    def merged(self) -> list[bytes]:
        return sorted(rec for name, slot in self._open for rec in self.store.read(name, slot))

    def close(self) -> None:
        self._open.clear()
        if self._stack is not None:
            self._stack.close()
            self._stack = None


def preload(store: ShardStore, slots: ReadSlots, names: list[str]) -> dict[str, list[bytes]]:
    loaded: dict[str, list[bytes]] = {}
    with ExitStack() as stack:
        for name in names:
            slot = slots.occupy(name)  # leak: pop_all() lifts the callbacks off and the result is dropped
            stack.callback(slots.leave, slot)
            loaded[name] = store.read(name, slot)
        if all(loaded.values()):
            stack.pop_all()
            return loaded
    return {name: recs for name, recs in loaded.items() if recs}


def first_records(store: ShardStore, slots: ReadSlots) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    for name in store.names():
        with reading(slots, name) as slot:  # clean: near miss, continue inside the block still exits it
            records = store.read(name, slot)
            if not records:
                continue
            out[name] = records[0]
    return out


def audit_sizes(store: ShardStore, slots: ReadSlots, full: bool) -> list[tuple[str, int]]:
    rows = []
    for name in store.names():
        with optional_read(slots, name, wanted=full) as slot:  # clean: the manager undoes what it took
            size = len(store.read(name, slot)) if slot is not None else -1
        rows.append((name, size))
    return rows
