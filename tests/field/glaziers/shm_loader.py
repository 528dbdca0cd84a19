"""Training data loader with a ring of shared-memory slots between readers and the step."""
import glob
import os
import queue
import struct
import threading
from typing import BinaryIO, Dict, Iterator, List, Optional

import numpy as np


class RingSlot:
    def __init__(self, index: int, nbytes: int):
        self.index = index
        self.array = np.zeros(nbytes, dtype=np.uint8)
        self.used = 0


class ShmRing:
    def __init__(self, slots: int, slot_bytes: int):
        self.slot_bytes = slot_bytes
        self._free: "queue.Queue[RingSlot]" = queue.Queue()
        for i in range(slots):
            self._free.put(RingSlot(i, slot_bytes))

    def take(self, timeout: Optional[float] = None) -> Optional[RingSlot]:
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            return None

    def put_back(self, slot: RingSlot) -> None:
        slot.used = 0
        self._free.put(slot)


class ShardFiles:
    """Open shard handles, kept few because of the cluster's descriptor limits."""

    def __init__(self, pattern: str):
        self.paths = sorted(glob.glob(pattern))
        self._open: Dict[int, BinaryIO] = {}

    def open_shard(self, i: int) -> BinaryIO:
        f = open(self.paths[i], "rb")  # clean: filed and returned, close_shard closes it
        self._open[f.fileno()] = f
        return f

    def close_shard(self, f: BinaryIO) -> None:
        del self._open[f.fileno()]
        f.close()

    def size_of(self, i: int) -> int:
        return os.path.getsize(self.paths[i])


def read_record(f: BinaryIO) -> Optional[bytes]:
    head = f.read(4)
    if len(head) < 4:
        return None
    (n,) = struct.unpack("<I", head)
    return f.read(n)


class Loader:
    def __init__(self, shards: ShardFiles, ring: ShmRing, depth: int = 4):
        self.shards = shards
        self.ring = ring
        self.ready: "queue.Queue[Optional[RingSlot]]" = queue.Queue(maxsize=depth)
        self.stop = threading.Event()
        self.current: Optional[BinaryIO] = None
        self.held: List[RingSlot] = []

    def advance(self, i: int) -> BinaryIO:
        f = self.shards.open_shard(i)  # clean: near miss, the shard before it is closed, the last one by close
        if self.current is not None:
            self.shards.close_shard(self.current)
        self.current = f
        return f

    def produce(self, order: List[int]) -> None:
        for i in order:
            f = self.advance(i)  # clean: the loader's current shard, closed on the next or by close
            while (rec := read_record(f)) is not None:
                slot = self.ring.take()  # leak: an oversized record is skipped after its slot was taken
                if len(rec) > self.ring.slot_bytes:
                    continue
                slot.array[: len(rec)] = np.frombuffer(rec, dtype=np.uint8)
                slot.used = len(rec)
                self.ready.put(slot)
        self.ready.put(None)

    def produce_tail(self, i: int, skip: int) -> int:
        f = self.shards.open_shard(i)  # clean: near miss, the break at stop goes on to close_shard
        n = 0
        while (rec := read_record(f)) is not None:
            if n < skip or len(rec) > self.ring.slot_bytes:
                n += 1
                continue
            slot = self.ring.take(timeout=1.0)  # clean: near miss, put back at stop, otherwise queued for the consumer
            if slot is None:
                break
            if self.stop.is_set():
                self.ring.put_back(slot)
                break
            slot.array[: len(rec)] = np.frombuffer(rec, dtype=np.uint8)
            slot.used = len(rec)
            self.ready.put(slot)
            n += 1
        self.shards.close_shard(f)
        return n

    def next_slot(self) -> Optional[RingSlot]:
        return self.ready.get()

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            slot = self.next_slot()  # clean: near miss, put back in the finally also when the consumer stops early
            if slot is None:
                return
            try:
                yield slot.array[: slot.used]
            finally:
                self.ring.put_back(slot)

    def pinned_batches(self, bs: int) -> Iterator[List[np.ndarray]]:
        while (slot := self.next_slot()) is not None:  # leak: a last batch that is short is not put back after the loop
            self.held.append(slot)
            if len(self.held) == bs:
                yield [s.array[: s.used] for s in self.held]
                for s in self.held:
                    self.ring.put_back(s)
                self.held = []
        self.held = []

    def count(self, i: int) -> int:
        f = self.shards.open_shard(i)  # leak: the empty shard's return leaves the file open
        if self.shards.size_of(i) == 0:
            return 0
        n = 0
        while read_record(f) is not None:
            n += 1
        self.shards.close_shard(f)
        return n

    def first_record(self, i: int) -> Optional[bytes]:
        f = self.shards.open_shard(i)  # clean: near miss, closed before the record is judged
        rec = read_record(f)
        self.shards.close_shard(f)
        if not rec:
            return None
        return rec

    def sample(self, k: int) -> List[bytes]:
        out: List[bytes] = []
        for i in range(len(self.shards.paths)):
            f = self.shards.open_shard(i)  # leak: reaching k breaks out with this shard open
            rec = read_record(f)
            if rec is not None:
                out.append(rec)
            if len(out) == k:
                break
            self.shards.close_shard(f)
        return out

    def close(self) -> None:
        self.stop.set()
        if self.current is not None:
            self.shards.close_shard(self.current)
            self.current = None
