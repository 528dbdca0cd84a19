"""Data loader whose workers collate into shared-memory slabs."""
from __future__ import annotations

import logging
import queue
import struct
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

log = logging.getLogger(__name__)

HEADER = struct.Struct("<II")


class Slab:
    def __init__(self, ident: int, size: int):
        self.ident = ident
        self.mem = bytearray(size)
        self.length = 0


class SlabRing:
    """Slabs shared between the workers and the consumer."""

    def __init__(self, count: int, size: int):
        self.size = size
        self._free: "queue.Queue[Slab]" = queue.Queue()
        self._lent: Dict[int, Slab] = {}
        for i in range(count):
            self._free.put(Slab(i, size))

    def free_slabs(self) -> int:
        return self._free.qsize()

    def claim(self, timeout: Optional[float] = None) -> Slab:
        """Raises queue.Empty after `timeout`."""
        slab = self._free.get(timeout=timeout)
        self._lent[slab.ident] = slab
        return slab

    def claim_nowait(self) -> Optional[Slab]:
        try:
            return self.claim(timeout=0.001)  # clean: handed to the caller
        except queue.Empty:
            return None

    def unclaim(self, slab: Slab) -> None:
        self._lent.pop(slab.ident, None)
        slab.length = 0
        self._free.put(slab)

    def unclaim_id(self, ident: int) -> None:
        self.unclaim(self._lent[ident])


class SlabLease:
    def __init__(self, ring: SlabRing, slab: Slab, borrowed: bool = False):
        self.ring = ring
        self.slab = slab
        self.borrowed = borrowed

    def __enter__(self) -> Slab:
        return self.slab

    def __exit__(self, exc_type, exc, tb) -> None:
        if exc_type is not None and issubclass(exc_type, ValueError):
            return True
        if not self.borrowed:
            self.ring.unclaim(self.slab)
        return False


class Batch:
    __slots__ = ("slab", "count", "meta")

    def __init__(self, slab: Slab, count: int):
        self.slab = slab
        self.count = count
        self.meta: Dict[str, Any] = {}


def encode(sample: bytes, slab: Slab) -> bool:
    end = slab.length + HEADER.size + len(sample)
    if end > len(slab.mem):
        return False
    HEADER.pack_into(slab.mem, slab.length, len(sample), 0)
    slab.mem[slab.length + HEADER.size:end] = sample
    slab.length = end
    return True


def decode(slab: Slab) -> List[bytes]:
    out, pos = [], 0
    while pos < slab.length:
        n, _ = HEADER.unpack_from(slab.mem, pos)
        out.append(bytes(slab.mem[pos + HEADER.size:pos + HEADER.size + n]))
        pos += HEADER.size + n
    return out


class Worker:
    def __init__(self, ring: SlabRing, dataset: Sequence[bytes], out: "queue.Queue[Batch]"):
        self.ring = ring
        self.dataset = dataset
        self.out = out

    def collate(self, indices: Sequence[int]) -> Optional[Batch]:
        slab = self.ring.claim()  # leak: a batch that does not fit returns None without the unclaim
        count = 0
        for i in indices:
            if not encode(self.dataset[i], slab):
                log.warning("batch of %d does not fit", len(indices))
                return None
            count += 1
        return Batch(slab, count)

    def collate_split(self, indices: Sequence[int]) -> List[Batch]:
        """Like collate, but starts another slab when one is full."""
        batches: List[Batch] = []
        slab = self.ring.claim()  # clean: near miss, moved into a batch before the name is rebound, or given back at the end
        count = 0
        for i in indices:
            if not encode(self.dataset[i], slab):
                batches.append(Batch(slab, count))
                slab, count = self.ring.claim(), 0  # clean: same holder as the first slab
                encode(self.dataset[i], slab)
            count += 1
        if count:
            batches.append(Batch(slab, count))
        else:
            self.ring.unclaim(slab)
        return batches

    def produce(self, indices: Sequence[int]) -> bool:
        batch = self.collate(indices)  # clean: queued for the consumer, which recycles it
        if batch is None:
            return False
        self.out.put(batch)
        return True


class Loader:
    def __init__(self, dataset: Sequence[bytes], batch_size: int, slabs: int = 4, slab_size: int = 256,
                 transform: Optional[Callable[[bytes], bytes]] = None):
        self.dataset = dataset
        self.batch_size = batch_size
        self.ring = SlabRing(slabs, slab_size)
        self.ready: "queue.Queue[Batch]" = queue.Queue()
        self.worker = Worker(self.ring, dataset, self.ready)
        self.transform = transform
        self._reorder: Dict[int, Batch] = {}

    def _index_groups(self) -> List[List[int]]:
        n = len(self.dataset)
        return [list(range(i, min(i + self.batch_size, n))) for i in range(0, n, self.batch_size)]

    def recycle(self, batch: Batch) -> None:
        self.ring.unclaim(batch.slab)

    def __iter__(self) -> Iterator[List[bytes]]:
        for group in self._index_groups():
            if not self.worker.produce(group):
                continue
            batch = self.ready.get()
            try:
                yield decode(batch.slab)
            finally:
                self.recycle(batch)

    def iter_raw(self) -> Iterator[memoryview]:
        """Zero copy: the view is valid until the next iteration."""
        for group in self._index_groups():
            slab = self.ring.claim()  # clean: near miss, the finally runs also when the consumer breaks
            try:
                for i in group:
                    encode(self.dataset[i], slab)
                yield memoryview(slab.mem)[: slab.length]
            finally:
                self.ring.unclaim(slab)

    def iter_pairs(self) -> Iterator[Tuple[List[bytes], List[bytes]]]:
        prev: Optional[Slab] = None
        for group in self._index_groups():
            cur = self.ring.claim()  # leak: the last one stays in prev when the loop ends
            for i in group:
                encode(self.dataset[i], cur)
            if prev is not None:
                pair = decode(prev), decode(cur)
                self.ring.unclaim(prev)
                yield pair
            prev = cur

    def reorder_put(self, seq: int, group: Sequence[int]) -> None:
        if seq in self._reorder:
            return
        slab = self.ring.claim_nowait()  # clean: near miss, kept in the reorder table until take or drain recycles it
        if slab is None:
            return
        for i in group:
            encode(self.dataset[i], slab)
        self._reorder[seq] = Batch(slab, len(group))

    def reorder_take(self, seq: int) -> Optional[List[bytes]]:
        batch = self._reorder.pop(seq, None)
        if batch is None:
            return None
        data = decode(batch.slab)
        self.recycle(batch)
        return data

    def reorder_drain(self) -> None:
        for batch in self._reorder.values():
            self.recycle(batch)
        self._reorder.clear()

    def transformed(self, index: int) -> Optional[bytes]:
        with SlabLease(self.ring, self.ring.claim()) as slab:  # leak: __exit__ returns before the unclaim on a ValueError, which it swallows
            data = self.dataset[index]
            if self.transform is not None:
                data = self.transform(data)
            if not encode(data, slab):
                raise ValueError(f"sample {index} too large")
            return decode(slab)[0]
        return None

    def describe(self, slab: Optional[Slab] = None) -> str:
        owned = slab is None
        if owned:
            slab = self.ring.claim()  # clean: near miss, given back under the same flag
            for s in self.dataset[:1]:
                encode(s, slab)
        text = f"slab {slab.ident}: {slab.length} bytes"
        if owned:
            self.ring.unclaim(slab)
        return text


if __name__ == "__main__":
    loader = Loader([bytes([i]) * (i + 1) for i in range(10)], 4)
    print(sum(len(b) for b in loader), loader.ring.free_slabs())
    for view in loader.iter_raw():
        break
    print(loader.ring.free_slabs(), loader.describe())
    loader.reorder_put(0, [1, 2]); loader.reorder_put(1, [3]); print(loader.reorder_take(0)); loader.reorder_drain()
    print(loader.transformed(0), loader.ring.free_slabs())
    print(len(list(loader.iter_pairs())), loader.ring.free_slabs())
