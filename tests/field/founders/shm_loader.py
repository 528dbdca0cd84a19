"""Data loader whose batches live in shared-memory slots."""
from __future__ import annotations

import random
from collections import OrderedDict
from typing import Dict, Iterator, List, Optional, Sequence, Tuple


class ShmSlot:
    def __init__(self, idx: int) -> None:
        self.idx = idx
        self.rows: List[int] = []


class ShmRing:
    def __init__(self, depth: int) -> None:
        self._free = [ShmSlot(i) for i in range(depth)]

    def get(self) -> Optional[ShmSlot]:
        return self._free.pop() if self._free else None

    def put(self, slot: ShmSlot) -> None:
        slot.rows = []
        self._free.append(slot)

    def __len__(self) -> int:
        return len(self._free)


class Batch:
    """Owns its slot until `free` is called."""

    def __init__(self, ring: ShmRing, slot: ShmSlot, step: int) -> None:
        self._ring = ring
        self._slot: Optional[ShmSlot] = slot
        self.step = step

    @property
    def rows(self) -> List[int]:
        return self._slot.rows if self._slot else []

    def free(self) -> None:
        if self._slot is not None:
            self._ring.put(self._slot)
            self._slot = None


class CorruptSample(ValueError):
    pass


class Collator:
    def __init__(self, ring: ShmRing, drop_last: bool) -> None:
        self.ring = ring
        self.drop_last = drop_last

    def fill(self, slot: ShmSlot, samples: Sequence[int]) -> None:
        for s in samples:
            if s < 0:
                raise CorruptSample(s)
            slot.rows.append(s)

    def collate(self, samples: Sequence[int], step: int) -> Optional[Batch]:
        slot = self.ring.get()  # leak: corrupt sample is caught and the slot is not put back
        if slot is None:
            return None
        try:
            self.fill(slot, samples)
        except CorruptSample:
            return None
        return Batch(self.ring, slot, step)

    def collate_clean(self, samples: Sequence[int], step: int) -> Optional[Batch]:
        slot = self.ring.get()  # clean: near miss, put back in the handler, else moved into the batch
        if not slot:
            return None
        try:
            self.fill(slot, samples)
        except CorruptSample:
            self.ring.put(slot)
            return None
        return Batch(self.ring, slot, step)


class Loader:
    def __init__(self, data: List[int], bs: int, ring: ShmRing, drop_last: bool = True) -> None:
        self.data = data
        self.bs = bs
        self.ring = ring
        self.collator = Collator(ring, drop_last)
        self._cache: "OrderedDict[int, Batch]" = OrderedDict()
        self._by_worker: Dict[int, List[Batch]] = {}

    def _chunks(self) -> Iterator[List[int]]:
        for i in range(0, len(self.data), self.bs):
            yield self.data[i:i + self.bs]

    def iter_slots(self) -> Iterator[ShmSlot]:
        for chunk in self._chunks():
            slot = self.ring.get()  # clean: near miss, generator with finally around yield
            if slot is None:
                return
            try:
                slot.rows.extend(chunk)
                yield slot
            finally:
                self.ring.put(slot)

    def iter_full(self) -> Iterator[ShmSlot]:
        for chunk in self._chunks():
            slot = self.ring.get()  # leak: the short last chunk ends the generator with the slot in hand
            if slot is None:
                return
            if len(chunk) < self.bs and self.collator.drop_last:
                return
            slot.rows.extend(chunk)
            yield slot
            self.ring.put(slot)

    def __iter__(self) -> Iterator[Batch]:
        for step, chunk in enumerate(self._chunks()):
            batch = self.collator.collate_clean(chunk, step)  # clean: yielded to the consumer who frees it
            if batch is None:
                continue
            yield batch

    def first_row(self) -> int:
        batch = self.collator.collate_clean(self.data[:self.bs], 0)  # leak: only the row is kept, batch never freed
        if batch is None:
            return -1
        return batch.rows[0]

    def mean(self) -> float:
        total = n = 0
        for batch in self:
            total += sum(batch.rows)
            n += len(batch.rows)
            batch.free()
        return total / max(n, 1)

    def prefetch(self, step: int, limit: int) -> None:
        chunk = self.data[step * self.bs:(step + 1) * self.bs]
        batch = self.collator.collate_clean(chunk, step)  # clean: cached, evicted with free
        if batch is None:
            return
        prev = self._cache.pop(step, None)
        if prev is not None:
            prev.free()
        self._cache[step] = batch
        while len(self._cache) > limit:
            _, old = self._cache.popitem(last=False)
            old.free()

    def assign(self, worker: int, step: int) -> bool:
        batch = self.collator.collate_clean(self.data[:self.bs], step)  # leak: forget drops a worker's list without free
        if batch is None:
            return False
        self._by_worker.setdefault(worker, []).append(batch)
        return True

    def forget(self, worker: int) -> int:
        return len(self._by_worker.pop(worker, []))

    def reset(self) -> None:
        for b in self._cache.values():
            b.free()
        self._cache.clear()


class ShuffleBuffer:
    """Keeps slots in a reservoir and emits a random one when full."""

    def __init__(self, ring: ShmRing, size: int) -> None:
        self.ring = ring
        self.size = size
        self._pool: List[ShmSlot] = []

    def push(self, value: int) -> Optional[int]:
        slot = self.ring.get()  # clean: near miss, goes into the reservoir; the victim is put back
        if slot is None:
            return None
        slot.rows.append(value)
        self._pool.append(slot)
        if len(self._pool) <= self.size:
            return None
        victim = self._pool.pop(random.randrange(len(self._pool)))
        out = victim.rows[0]
        self.ring.put(victim)
        return out

    def replace(self, pos: int, value: int) -> bool:
        slot = self.ring.get()  # leak: an index out of range returns False with the new slot
        if slot is None:
            return False
        slot.rows.append(value)
        if pos >= len(self._pool):
            return False
        old = self._pool[pos]
        self._pool[pos] = slot
        self.ring.put(old)
        return True

    def drain(self) -> List[int]:
        out = [s.rows[0] for s in self._pool]
        for s in self._pool:
            self.ring.put(s)
        self._pool = []
        return out


def zip_pairs(ring: ShmRing, pairs: List[Tuple[int, int]]) -> int:
    done = 0
    for a, b in pairs:
        left, right = ring.get(), ring.get()  # clean: near miss, both are put back if present
        try:
            if left is None or right is None:
                break
            left.rows.append(a)
            right.rows.append(b)
            done += 1
        finally:
            if left is not None:
                ring.put(left)
            if right is not None:
                ring.put(right)
    return done


def main() -> None:
    ring = ShmRing(6)
    ld = Loader(list(range(10)), 4, ring)
    assert ld.mean() == 4.5
    for s in ld.iter_slots():
        assert s.rows
    ld.prefetch(0, 1)
    ld.prefetch(1, 1)
    ld.reset()
    sb = ShuffleBuffer(ring, 2)
    for i in range(4):
        sb.push(i)
    sb.replace(0, 9)
    sb.drain()
    assert zip_pairs(ring, [(1, 2)]) == 1
    assert len(ring) == 6
    ld.first_row()


if __name__ == "__main__":
    main()
