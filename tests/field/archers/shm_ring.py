"""Shared memory between the tokenizer process, the engine and the detokenizers."""
import multiprocessing as mp
import struct
import time
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Dict, List, Optional

import numpy as np

HEADER = struct.Struct("<IIQ")
VERSION = 3


class RingFull(Exception):
    pass


class PayloadTooLarge(ValueError):
    pass


@dataclass(frozen=True)
class Desc:
    name: str
    seq: int
    version: int
    shape: tuple
    dtype: str


class Segment:
    """A leased segment and the number of readers that still have to acknowledge it."""

    def __init__(self, ring: "Ring", shm: SharedMemory):
        self.ring = ring
        self.shm = shm
        self.pending = 0
        self.sent_at = 0.0

    def write(self, seq: int, array: np.ndarray) -> Desc:
        HEADER.pack_into(self.shm.buf, 0, VERSION, array.nbytes, seq)
        np.ndarray(array.shape, array.dtype, buffer=self.shm.buf, offset=HEADER.size)[...] = array
        return Desc(self.shm.name, seq, VERSION, array.shape, array.dtype.str)


class Ring:
    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._all: List[SharedMemory] = []
        for _ in range(count):
            self._all.append(SharedMemory(create=True, size=nbytes + HEADER.size))  # clean: kept in the list and unlinked by destroy()
        self._free = list(self._all)

    def lease(self) -> Segment:
        if not self._free:
            raise RingFull(f"{len(self._all)} segments in flight")
        return Segment(self, self._free.pop())  # clean: returned to the caller inside the segment

    def try_lease(self) -> Optional[Segment]:
        if not self._free:
            return None
        return self.lease()  # clean: returned to the caller

    def give(self, seg: Segment) -> None:
        self._free.append(seg.shm)

    def destroy(self) -> None:
        for shm in self._all:
            shm.close()
            shm.unlink()
        self._all.clear()
        self._free.clear()


class Producer:
    def __init__(self, ring: Ring, out: "mp.Queue[Desc]", acks: "mp.Queue[int]"):
        self.ring = ring
        self.out = out
        self.acks = acks
        self.seq = 0
        self._inflight: Dict[int, Segment] = {}

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def _check(self, array: np.ndarray) -> None:
        if array.nbytes > self.ring.nbytes:
            raise PayloadTooLarge(f"{array.nbytes} > {self.ring.nbytes}")

    def publish_tokens(self, tokens: np.ndarray) -> int:
        seg = self.ring.lease()  # leak: tokens that do not fit raise with the segment leased
        self._check(tokens)
        return self._send(seg, tokens, 1)

    def publish_image(self, image: np.ndarray) -> Optional[int]:
        seg = self.ring.try_lease()  # clean: near miss, given when too large, else in the table until acknowledged or swept
        if seg is None:
            return None
        if image.nbytes > self.ring.nbytes:
            self.ring.give(seg)
            raise PayloadTooLarge(f"image of {image.nbytes} bytes")
        return self._send(seg, image, 1)

    def publish_chunks(self, chunks: List[np.ndarray]) -> List[int]:
        if any(c.nbytes > self.ring.nbytes for c in chunks):
            raise PayloadTooLarge("a chunk does not fit")
        segs: List[Segment] = []
        try:
            for _ in chunks:
                segs.append(self.ring.lease())  # clean: near miss, given back when the ring is full, else sent and acknowledged
        except RingFull:
            while segs:
                self.ring.give(segs.pop())
            raise
        return [self._send(seg, chunk, 1) for seg, chunk in zip(segs, chunks)]

    def broadcast(self, array: np.ndarray, readers: int) -> int:
        self._check(array)
        seg = self.ring.lease()  # leak: without readers it is sent to nobody and kept out of the table
        seq = self._next()
        desc = seg.write(seq, array)
        for _ in range(readers):
            self.out.put(desc)
        seg.pending = readers
        if seg.pending > 0:
            seg.sent_at = time.monotonic()
            self._inflight[seq] = seg
        return seq

    def _send(self, seg: Segment, array: np.ndarray, readers: int) -> int:
        seq = self._next()
        seg.pending = readers
        seg.sent_at = time.monotonic()
        self._inflight[seq] = seg
        self.out.put(seg.write(seq, array))
        return seq

    def drain_acks(self) -> None:
        while not self.acks.empty():
            seq = self.acks.get()
            seg = self._inflight.get(seq)
            if seg is None:
                continue
            seg.pending -= 1
            if seg.pending == 0:
                del self._inflight[seq]
                self.ring.give(seg)

    def sweep(self, max_age: float) -> None:
        cut = time.monotonic() - max_age
        for seq, seg in list(self._inflight.items()):
            if seg.sent_at < cut:
                print(f"segment {seq} was not acknowledged by {seg.pending} readers")
                del self._inflight[seq]
                self.ring.give(seg)


class Reader:
    """Attaches to each segment for one read."""

    def __init__(self, acks: "mp.Queue[int]"):
        self.acks = acks

    def read(self, desc: Desc) -> Optional[np.ndarray]:
        shm = SharedMemory(name=desc.name)  # leak: another version returns before the close
        version, nbytes, seq = HEADER.unpack_from(shm.buf, 0)
        if version != desc.version or seq != desc.seq:
            self.acks.put(desc.seq)
            return None
        out = np.ndarray(desc.shape, desc.dtype, buffer=shm.buf, offset=HEADER.size).copy()
        shm.close()
        self.acks.put(desc.seq)
        return out

    def peek(self, desc: Desc) -> bool:
        shm = SharedMemory(name=desc.name)  # clean: the finally detaches
        try:
            version, _, seq = HEADER.unpack_from(shm.buf, 0)
            return version == VERSION and seq == desc.seq
        finally:
            shm.close()


class View:
    """A counted attachment, for stages that hand the same data on."""

    def __init__(self, desc: Desc):
        self.desc = desc
        self.shm = SharedMemory(name=desc.name)  # clean: drop() detaches at the last reference
        self.refs = 1

    def retain(self) -> "View":
        self.refs += 1
        return self

    def drop(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.shm.close()

    def rows(self, start: int, stop: int) -> np.ndarray:
        whole = np.ndarray(self.desc.shape, self.desc.dtype, buffer=self.shm.buf, offset=HEADER.size)
        return whole[start:stop].copy()


class Splitter:
    """Gives each detokenizer its part of a batch."""

    def __init__(self, acks: "mp.Queue[int]"):
        self.acks = acks
        self._parts: Dict[int, View] = {}
        self._attached: Dict[str, SharedMemory] = {}

    def split(self, desc: Desc, bounds: List[int]) -> int:
        view = View(desc)  # clean: the reference of this function is dropped at its end
        made = 0
        for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
            part = view.retain()  # leak: an empty range is skipped after the reference was taken
            if lo == hi:
                continue
            self._parts[desc.seq << 16 | i] = part
            made += 1
        view.drop()
        return made

    def take(self, key: int, lo: int, hi: int) -> Optional[np.ndarray]:
        view = self._parts.pop(key, None)
        if view is None:
            return None
        rows = view.rows(lo, hi)
        view.drop()
        return rows

    def header(self, name: str) -> tuple:
        shm = self._attached.get(name)
        if shm is None:
            shm = self._attached[name] = SharedMemory(name=name)  # clean: near miss, kept for the next call and detached by close()
        return HEADER.unpack_from(shm.buf, 0)

    def close(self) -> None:
        for view in self._parts.values():
            view.drop()
        self._parts.clear()
        for shm in self._attached.values():
            shm.close()
        self._attached.clear()


def relay(desc: Desc, source: Reader, target: Producer) -> bool:
    """Copies a segment of one ring into another, in place of a second serialisation."""
    view = View(desc)  # leak: a full target ring is answered with False before the drop
    try:
        seq = target.publish_chunks([view.rows(0, desc.shape[0])])
    except (RingFull, PayloadTooLarge):
        return False
    view.drop()
    source.acks.put(desc.seq)
    return bool(seq)
