"""Spools metrics to segment files; a shipper reads them back."""
import gzip
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path

log = logging.getLogger("spool")

SEGMENT_BYTES = 1 << 20


class BufferPool:
    def __init__(self, n=32, size=4096):
        self.size = size
        self.ids = list(range(n))
        self.bufs = [bytearray(size) for _ in range(n)]

    def take(self):
        return self.ids.pop() if self.ids else None

    def release(self, i):
        self.bufs[i][:] = bytes(self.size)
        self.ids.append(i)


class Segment:
    """Current output file; rotates by size."""

    def __init__(self, root):
        self.root = Path(root)
        self.seq = 0
        self.fh = open(self.root / "0.seg", "ab")  # clean: rotate() and close() close it
        self.index = None
        self.lock = threading.Lock()

    def rotate(self):
        self.seq += 1
        self.fh.close()
        self.fh = open(self.root / f"{self.seq}.seg", "ab")  # clean: near miss, the old file is closed before

    def enable_index(self):
        self.index = open(self.root / "index", "a")  # leak: close() returns first if the segment file is closed, and calls of it twice overwrite

    def append(self, data):
        if self.fh.tell() + len(data) > SEGMENT_BYTES:
            self.rotate()
        self.fh.write(data)

    def append_locked(self, data):
        self.lock.acquire()  # leak: empty records return with the lock
        if not data:
            return 0
        n = self.fh.write(data)
        self.lock.release()
        return n

    def sync(self):
        self.lock.acquire()  # clean: finally
        try:
            if self.fh.closed:
                return
            self.fh.flush()
            os.fsync(self.fh.fileno())
        finally:
            self.lock.release()

    def close(self):
        if self.fh.closed:
            return
        self.fh.close()
        if self.index is not None:
            self.index.close()


class Spooler:
    def __init__(self, segment, pool):
        self.segment, self.pool = segment, pool
        self.open_batches = OrderedDict()

    def record(self, name, value):
        i = self.pool.take()  # leak: an oversized record is logged and dropped with the buffer
        if i is None:
            return False
        data = json.dumps({"n": name, "v": value, "t": time.time()}).encode()
        if len(data) > self.pool.size:
            log.warning("record %s too large", name)
            return False
        self.pool.bufs[i][: len(data)] = data
        self.segment.append(bytes(self.pool.bufs[i][: len(data)]))
        self.pool.release(i)
        return True

    def begin_batch(self, key):
        if key not in self.open_batches:
            i = self.pool.take()  # clean: in the table, end_batch() and abandon() release
            if i is None:
                raise MemoryError("spool buffers exhausted")
            self.open_batches[key] = [i, 0]

    def add(self, key, data):
        i, pos = self.open_batches[key]
        self.pool.bufs[i][pos: pos + len(data)] = data
        self.open_batches[key][1] = pos + len(data)

    def end_batch(self, key):
        i, pos = self.open_batches.pop(key)
        self.segment.append(bytes(self.pool.bufs[i][:pos]))
        self.pool.release(i)

    def abandon(self):
        while self.open_batches:
            _, (i, _pos) = self.open_batches.popitem()
            self.pool.release(i)

    def compress(self, chunks):
        i = self.pool.take()  # clean: near miss, taken before a loop with continue and break, released after it
        if i is None:
            return []
        out = []
        for c in chunks:
            if not c:
                continue
            if len(c) > self.pool.size:
                break
            self.pool.bufs[i][: len(c)] = c
            out.append(gzip.compress(bytes(self.pool.bufs[i][: len(c)])))
        self.pool.release(i)
        return out

    def frame(self, chunks):
        ids = []
        for c in chunks:
            i = self.pool.take()  # leak: an empty chunk ends the generator with all ids taken
            if i is None:
                break
            ids.append(i)
            self.pool.bufs[i][: len(c)] = c
            if not c:
                return
            yield memoryview(self.pool.bufs[i])[: len(c)]
        for i in ids:
            self.pool.release(i)


def segments(root):
    for p in sorted(Path(root).glob("*.seg")):
        with open(p, "rb") as fh:  # clean: with block
            yield p.name, fh.read()


def first_record(root):
    for p in sorted(Path(root).glob("*.seg")):
        fh = open(p, "rb")  # leak: the return in the loop leaves it open
        line = fh.readline()
        if line:
            return json.loads(line)
        fh.close()
    return None


def last_record(root):
    rec = None
    for p in sorted(Path(root).glob("*.seg")):
        fh = open(p, "rb")  # clean: near miss, closed in finally under the break
        try:
            lines = fh.readlines()
            if not lines:
                break
            rec = json.loads(lines[-1])
        finally:
            fh.close()
    return rec


def merge(root, dst):
    out = open(dst, "wb")  # clean: closed at the end
    total = 0
    for p in sorted(Path(root).glob("*.seg")):
        total += out.write(open(p, "rb").read())  # leak: the source is opened in the expression and not closed
    out.close()
    return total


def tail_sizes(root, n):
    handles = [open(p, "rb") for p in sorted(Path(root).glob("*.seg"))]  # leak: only the last n are closed
    sizes = []
    for fh in handles[-n:]:
        sizes.append(fh.seek(0, os.SEEK_END))
        fh.close()
    return sizes
