"""Reading tokenised shards through a ring of reusable slots.

Everything here is a function over iterators.  A slot is a numpy array of fixed size; `take` hands one out and `give`
returns it.  A Record names the slot its bytes are in, so whoever drops the record must give the slot.
"""
import collections
import contextlib
import glob
import mmap
import os
import queue
import random
import struct
import sys
import threading
import zlib
from typing import NamedTuple

import numpy as np

MAGIC = b"TOKS"
HEADER = struct.Struct("<IIQ")
Record = collections.namedtuple("Record", "slot length key")


class RingDry(Exception):
    pass


class Overflow(Exception):
    pass


class Ring(NamedTuple):
    take: object
    give: object
    size: int


def make_ring(slots, size):
    free = queue.SimpleQueue()
    for _ in range(slots):
        free.put(np.empty(size, dtype=np.uint8))

    def take(timeout=None):
        try:
            return free.get(timeout=timeout)  # clean: handed out
        except queue.Empty:
            raise RingDry("no slot in %.1fs" % timeout) from None

    def give(slot):
        free.put(slot)

    return Ring(take, give, size)


def make_checked_ring(slots, size, poison=0xAB):
    """A ring that looks for writes after the give, for debugging."""
    free = collections.deque(np.full(size, poison, dtype=np.uint8) for _ in range(slots))
    cv = threading.Condition()

    def take(timeout=None):
        with cv:
            while True:
                while not free:
                    cv.wait(timeout)
                slot = free.popleft()  # leak: a slot with a broken poison pattern is reported and dropped from the ring
                if (slot == poison).all():
                    return slot
                print("slot %x written after give" % id(slot), file=sys.stderr)

    def give(slot):
        slot.fill(poison)
        with cv:
            free.append(slot)
            cv.notify()

    return Ring(take, give, size)


@contextlib.contextmanager
def scratch(ring):
    slot = ring.take()  # clean: finally
    try:
        yield slot
    finally:
        ring.give(slot)


def open_shard(path):
    fh = open(path, "rb")  # leak: a file with a wrong magic number makes this return None with the file open
    if fh.read(4) != MAGIC:
        print("skipping %s: not a shard" % path, file=sys.stderr)
        return None
    return fh


def read_records(paths, ring):
    for path in paths:
        fh = open_shard(path)  # clean: None for a skipped file and the with closes the rest
        if fh is None:
            continue
        with fh:
            while True:
                head = fh.read(HEADER.size)
                if len(head) < HEADER.size:
                    break
                length, crc, key = HEADER.unpack(head)
                slot = ring.take()  # leak: verified() skips a record with a wrong checksum and never gives its slot
                if length > ring.size:
                    fh.seek(length, os.SEEK_CUR)
                    ring.give(slot)
                    continue
                got = fh.readinto(memoryview(slot)[:length])
                if got < length:
                    ring.give(slot)
                    break
                yield Record(slot, length, key), crc


def verified(stream, counts):
    for record, crc in stream:
        if zlib.crc32(record.slot[: record.length]) != crc:
            counts["bad"] += 1
            continue
        counts["good"] += 1
        yield record


def read_mapped(path, ring):
    """The same records from a mapping, for shards that are already in the page cache."""
    fd = os.open(path, os.O_RDONLY)  # clean: near miss, the mapping keeps its own duplicate and the finally closes this one
    try:
        view = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)  # clean: closed by the with
    finally:
        os.close(fd)
    with view:
        pos = len(MAGIC)
        while pos + HEADER.size <= len(view):
            length, _, key = HEADER.unpack_from(view, pos)
            pos += HEADER.size
            slot = ring.take()  # clean: the record owns it and write_out() or packed() gives it
            slot[:length] = np.frombuffer(view, np.uint8, length, pos)
            pos += length
            yield Record(slot, length, key)


def shuffled(stream, window, rng):
    held = []
    for record in stream:
        if len(held) < window:
            held.append(record)
            continue
        i = rng.randrange(window)
        out, held[i] = held[i], record
        yield out
    rng.shuffle(held)
    yield from held


def packed(stream, ring, width):
    """Concatenate records into rows of `width` bytes; one slot a row."""
    row, used = ring.take(), 0  # leak: a stream without records ends with used == 0 and the row is dropped
    for record in stream:
        if used + record.length > width:
            yield Record(row, used, record.key)
            row, used = ring.take(), 0  # clean: near miss, it gets a record at once, so it is never the empty last row
        row[used : used + record.length] = record.slot[: record.length]
        used += record.length
        ring.give(record.slot)
    if used:
        yield Record(row, used, -1)


def spread(stream, ring, copies):
    """Each record `copies` times, each time in a slot of its own."""
    for record in stream:
        for _ in range(copies - 1):
            twin = ring.take()  # clean: leaves with the record that is yielded
            twin[: record.length] = record.slot[: record.length]
            yield Record(twin, record.length, record.key)
        yield record


def write_out(stream, ring, sink):
    n = 0
    for record in stream:
        sink(bytes(record.slot[: record.length]))
        ring.give(record.slot)
        n += 1
    return n


def header_end(view, limit):
    end = bytes(view).find(b"\0\0")
    if end < 0 or end > limit:
        raise Overflow("header of more than %d bytes" % limit)
    return end


def header_of(ring, path, limit):
    slot = ring.take(5.0)  # leak: Overflow of header_end() passes through before the give
    with open(path, "rb") as fh:  # clean: with
        n = fh.readinto(memoryview(slot))
    text = bytes(slot[: header_end(slot[:n], limit)]).decode()
    ring.give(slot)
    return text


def fingerprint(ring, path):
    crc = 0
    with scratch(ring) as slot, open(path, "rb") as fh:  # clean: both are context managers
        while True:
            n = fh.readinto(memoryview(slot))
            if not n:
                return crc
            crc = zlib.crc32(slot[:n], crc)


def merge_keys(paths):
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(p, "rb")) for p in paths]  # clean: near miss, the stack closes those opened so far
        for rows in zip(*(iter(f.readline, b"") for f in files)):
            yield min(rows)


def interleave(a, b, ring, seed):
    """Random alternation of two record streams; ends with the shorter one."""
    rng = random.Random(seed)
    pads = [ring.take(), ring.take()]  # leak: the slot of the stream that ends first is not among those given below
    for i, pad in enumerate(pads):
        pad[:8] = i
    while True:
        which = rng.randrange(2)
        try:
            record = next((a, b)[which])
        except StopIteration:
            ring.give(pads[1 - which])
            return
        yield Record(record.slot, record.length, record.key ^ int(pads[which][0]))


def main(pattern, out):
    counts = collections.Counter()
    ring = make_ring(64, 1 << 20)
    stream = verified(read_records(sorted(glob.glob(pattern)), ring), counts)
    with open(out, "wb") as fh:  # clean: with
        n = write_out(packed(shuffled(stream, 32, random.Random(0)), ring, 1 << 16), ring, fh.write)
    print(n, "rows", dict(counts))
