"""Data loading through shared-memory slots."""
from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Callable, Deque, Dict, Iterable, Iterator, List, Optional, Tuple

log = logging.getLogger("data.shm")

Sample = bytes


class SlotArena:
    """One shared-memory segment cut into equal slots."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.segment = shared_memory.SharedMemory(create=True, size=slots * slot_bytes)  # clean: near miss, backing store, destroyed with the arena
        self._free: Deque[int] = deque(range(slots))

    def alloc(self) -> int:
        """Slot index, or -1 when none is free."""
        return self._free.popleft() if self._free else -1

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def write(self, slot: int, data: bytes) -> None:
        off = slot * self.slot_bytes
        self.segment.buf[off:off + len(data)] = data

    def read(self, slot: int, n: int) -> bytes:
        off = slot * self.slot_bytes
        return bytes(self.segment.buf[off:off + n])

    def free_count(self) -> int:
        return len(self._free)

    def destroy(self) -> None:
        self.segment.close()
        self.segment.unlink()


@dataclass
class Batch:
    index: int
    slot: int
    nbytes: int


class Worker:
    def __init__(self, arena: SlotArena, decode: Callable[[bytes], Sample]) -> None:
        self.arena = arena
        self.decode = decode
        self.errors = 0

    def produce(self, index: int, raw: bytes) -> Optional[Batch]:
        slot = self.arena.alloc()  # leak: undecodable samples return None with the slot taken
        if slot < 0:
            return None
        try:
            data = self.decode(raw)
        except ValueError as e:
            self.errors += 1
            log.debug("sample %d skipped: %s", index, e)
            return None
        self.arena.write(slot, data)
        return Batch(index, slot, len(data))

    def produce_checked(self, index: int, raw: bytes) -> Optional[Batch]:
        slot = self.arena.alloc()  # clean: near miss, -1 check, freed when decoding fails, else moved into the batch
        if slot < 0:
            return None
        try:
            data = self.decode(raw)
            self.arena.write(slot, data)
        except ValueError:
            self.arena.free(slot)
            self.errors += 1
            return None
        return Batch(index, slot, len(data))


class Loader:
    def __init__(self, arena: SlotArena, worker: Worker, prefetch: int = 2) -> None:
        self.arena = arena
        self.worker = worker
        self.prefetch = prefetch
        self._ready: "OrderedDict[int, Batch]" = OrderedDict()

    def fill(self, source: Iterator[Tuple[int, bytes]]) -> None:
        while len(self._ready) < self.prefetch:
            item = next(source, None)
            if item is None:
                return
            batch = self.worker.produce_checked(*item)  # clean: kept in _ready until next_batch or shutdown
            if batch is not None:
                self._ready[batch.index] = batch

    def next_batch(self) -> Optional[bytes]:
        if not self._ready:
            return None
        _, batch = self._ready.popitem(last=False)
        data = self.arena.read(batch.slot, batch.nbytes)
        self.arena.free(batch.slot)
        return data

    def shutdown(self) -> None:
        for batch in self._ready.values():
            self.arena.free(batch.slot)
        self._ready.clear()

    def iterate(self, data: Iterable[bytes]) -> Iterator[bytes]:
        source = enumerate(data)
        try:
            while True:
                self.fill(source)
                out = self.next_batch()
                if out is None:
                    break
                yield out
        finally:
            self.shutdown()


def iter_slots(arena: SlotArena, data: Iterable[bytes]) -> Iterator[Tuple[int, int]]:
    """Yields (slot, nbytes); the slot belongs to the consumer for the length of one round."""
    for raw in data:
        slot = arena.alloc()  # leak: a consumer that stops early never reaches the free after the yield
        if slot < 0:
            return
        arena.write(slot, raw)
        yield slot, len(raw)
        arena.free(slot)


def iter_slots_scoped(arena: SlotArena, data: Iterable[bytes]) -> Iterator[Tuple[int, int]]:
    for raw in data:
        slot = arena.alloc()  # clean: finally around the yield
        if slot < 0:
            return
        try:
            arena.write(slot, raw)
            yield slot, len(raw)
        finally:
            arena.free(slot)


def first_non_empty(arena: SlotArena, data: Iterable[bytes]) -> Optional[bytes]:
    for slot, n in iter_slots(arena, data):
        if n:
            return arena.read(slot, n)
    return None


def head(arena: SlotArena, data: Iterable[bytes], count: int) -> List[bytes]:
    out: List[bytes] = []
    for slot, n in iter_slots_scoped(arena, data):
        out.append(arena.read(slot, n))
        if len(out) == count:
            break
    return out


class ShuffleBuffer:
    def __init__(self, arena: SlotArena, size: int) -> None:
        self.arena = arena
        self.size = size
        self._held: List[Batch] = []

    def push(self, index: int, raw: bytes) -> Optional[bytes]:
        """Adds a sample and pops the oldest one once the buffer is full."""
        slot = self.arena.alloc()  # clean: moved into the list; popped and freed here or in drain
        if slot < 0:
            return None
        self.arena.write(slot, raw)
        self._held.append(Batch(index, slot, len(raw)))
        if len(self._held) <= self.size:
            return None
        old = self._held.pop((index * 7919) % len(self._held))
        data = self.arena.read(old.slot, old.nbytes)
        self.arena.free(old.slot)
        return data

    def drain(self) -> Iterator[bytes]:
        while self._held:
            b = self._held.pop()
            data = self.arena.read(b.slot, b.nbytes)
            self.arena.free(b.slot)
            yield data


class SampleCache:
    def __init__(self, arena: SlotArena, limit: int) -> None:
        self.arena = arena
        self.limit = limit
        self._lru: "OrderedDict[str, Tuple[int, int]]" = OrderedDict()

    def lookup(self, key: str, load: Callable[[str], bytes]) -> bytes:
        hit = self._lru.get(key)
        if hit is not None:
            self._lru.move_to_end(key)
            return self.arena.read(*hit)
        data = load(key)
        if len(self._lru) >= self.limit:
            self._lru.popitem(last=False)
        slot = self.arena.alloc()  # leak: evicted entries are popped without freeing their slot
        if slot >= 0:
            self.arena.write(slot, data)
            self._lru[key] = (slot, len(data))
        return data

    def clear(self) -> None:
        for slot, _ in self._lru.values():
            self.arena.free(slot)
        self._lru.clear()


def collate(arena: SlotArena, parts: List[bytes], drop_short: bool) -> Optional[bytes]:
    slots: Dict[int, int] = {}
    for part in parts:
        slot = arena.alloc()  # leak: the drop_short return abandons the slots collected so far
        if slot < 0:
            break
        if drop_short and len(part) < 2:
            arena.free(slot)
            return None
        arena.write(slot, part)
        slots[slot] = len(part)
    joined = b"".join(arena.read(s, n) for s, n in slots.items())
    for s in slots:
        arena.free(s)
    return joined


def attach_peer(name: str, nbytes: int) -> Optional[bytes]:
    seg = shared_memory.SharedMemory(name=name)  # leak: a segment that is too small returns before close
    if seg.size < nbytes:
        return None
    data = bytes(seg.buf[:nbytes])
    seg.close()
    return data


def main() -> None:
    arena = SlotArena(8, 64)  # clean: destroyed below
    try:
        loader = Loader(arena, Worker(arena, lambda r: r.upper()))
        print(list(loader.iterate([b"aa", b"bb", b"cc"])))
        print(head(arena, [b"x", b"y", b"z"], 2), first_non_empty(arena, [b"", b"q"]))
        buf = ShuffleBuffer(arena, 1)
        buf.push(0, b"s0")
        buf.push(1, b"s1")
        print(list(buf.drain()))
        cache = SampleCache(arena, 2)
        cache.lookup("k", lambda k: k.encode())
        cache.clear()
        print(collate(arena, [b"ab", b"cd"], drop_short=True), arena.free_count())
    finally:
        arena.destroy()


if __name__ == "__main__":
    main()
