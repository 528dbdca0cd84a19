"""Block layer of the checkpoint store: page cache, extents, descriptors, log segments, I/O credits."""
from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from enum import Enum


class NoSpace(OSError):
    pass


class PageCache:
    def __init__(self, fetch, capacity=256):
        self._fetch = fetch
        self._capacity = capacity
        self._pages = OrderedDict()
        self._holds = Counter()
        self._mutex = threading.Lock()
        self.hits = self.misses = 0

    def hold(self, fileno, index):
        key = (fileno, index)
        with self._mutex:
            page = self._pages.get(key)
            if page is None:
                self.misses += 1
                self._evict_cold()
                page = self._pages[key] = bytearray(self._fetch(fileno, index))
            else:
                self.hits += 1
            self._pages.move_to_end(key)
            self._holds[key] += 1
            return memoryview(page)

    def drop_hold(self, fileno, index):
        key = (fileno, index)
        with self._mutex:
            if self._holds[key] <= 0:
                raise RuntimeError(f"page {key} is not held")
            self._holds[key] -= 1
            if not self._holds[key]:
                del self._holds[key]

    def _evict_cold(self):
        if len(self._pages) < self._capacity:
            return
        for key in self._pages:
            if key not in self._holds:
                del self._pages[key]
                return


def find_magic(cache, fd, npages, magic):
    for index in range(npages):
        view = cache.hold(fd, index)  # leak: returns from the loop with the matching page held
        if bytes(view[: len(magic)]) == magic:
            return index
        cache.drop_hold(fd, index)
    return -1


def copy_page(cache, src, dst, index):
    a = cache.hold(src, index)  # clean: dropped at the end
    b = cache.hold(dst, index)  # clean: dropped at the end
    if a != b:
        b[:] = a
    cache.drop_hold(dst, index)
    cache.drop_hold(src, index)


class ReadAhead:
    def __init__(self, cache, fd):
        self.cache = cache
        self.fd = fd
        self.window = []

    def extend(self, first, count):
        for index in range(first, first + count):
            self.cache.hold(self.fd, index)  # clean: near miss, the index is kept in the window that collapse drops
            self.window.append(index)

    def collapse(self):
        while self.window:
            self.cache.drop_hold(self.fd, self.window.pop())


class ExtentBitmap:
    """One bit a block in a Python int; first fit."""

    __slots__ = ("_bits", "_nblocks", "_free", "low_water")

    def __init__(self, nblocks):
        self._bits = 0
        self._nblocks = nblocks
        self._free = nblocks
        self.low_water = nblocks

    def carve(self, length):
        mask = (1 << length) - 1
        for start in range(self._nblocks - length + 1):
            if not (self._bits >> start) & mask:
                self._bits |= mask << start
                self._free -= length
                self.low_water = min(self.low_water, self._free)
                return start, length
        raise NoSpace(f"no run of {length} blocks")

    def mend(self, extent):
        start, length = extent
        mask = ((1 << length) - 1) << start
        assert self._bits & mask == mask, "extent is not carved"
        self._bits &= ~mask
        self._free += length


def write_blob(bitmap, device, blob, block=4096):
    extent = bitmap.carve(-(-len(blob) // block))  # leak: a failed write is caught and answered False with the extent carved
    try:
        device.write(extent[0] * block, blob)
    except OSError:
        return False
    device.index.append(extent)
    return True


def scrub(bitmap, device, block=4096):
    try:
        extent = bitmap.carve(8)  # clean: mended on both ways
    except NoSpace:
        return False
    try:
        device.write(extent[0] * block, bytes(8 * block))
        return True
    except OSError:
        return False
    finally:
        bitmap.mend(extent)


def relocate(bitmap, device, old):
    fresh = bitmap.carve(old[1])  # clean: stored as the file's extent
    device.copy(old[0], fresh[0], old[1])
    bitmap.mend(old)
    device.index.append(fresh)


class DescriptorCache:
    """One descriptor a path, counted; closed with the last user."""

    def __init__(self):
        self._fds = {}
        self._users = {}

    def open_shared(self, path):
        fd = self._fds.get(path)
        if fd is None:
            fd = self._fds[path] = os.open(path, os.O_RDONLY)
            self._users[path] = 0
        self._users[path] += 1
        return fd

    def close_shared(self, path):
        self._users[path] -= 1
        if self._users[path] == 0:
            os.close(self._fds.pop(path))
            del self._users[path]


def read_header(fds, path, size=64):
    fd = fds.open_shared(path)  # clean: closed after the read
    header = os.pread(fd, size, 0)
    fds.close_shared(path)
    return header


def same_file(fds, left, right):
    a = fds.open_shared(left)  # leak: never closed when the sizes differ
    b = fds.open_shared(right)  # leak: never closed when the sizes differ
    if os.fstat(a).st_size != os.fstat(b).st_size:
        return False
    equal = os.pread(a, 1 << 16, 0) == os.pread(b, 1 << 16, 0)
    fds.close_shared(left)
    fds.close_shared(right)
    return equal


class SegState(Enum):
    BLANK = 0
    FILLING = 1
    SEALED = 2


class LogSegment:
    __slots__ = ("number", "buf", "state", "_log")

    def __init__(self, log, number, size):
        self._log = log
        self.number = number
        self.buf = bytearray(size)
        self.state = SegState.BLANK

    def seal(self):
        if self.state is not SegState.FILLING:
            raise ValueError("segment is not filling")
        self.state = SegState.SEALED
        self._log._sealed(self)

    def scratch(self):
        if self.state is not SegState.FILLING:
            raise ValueError("segment is not filling")
        self.state = SegState.BLANK
        self._log._scratched(self)


class SegmentLog:
    def __init__(self, nsegments=4, size=1 << 16):
        self._blank = [LogSegment(self, i, size) for i in range(nsegments)]
        self._to_flush = []
        self._cv = threading.Condition()

    def start_segment(self):
        with self._cv:
            while not self._blank:
                self._cv.wait()
            seg = self._blank.pop()
            seg.state = SegState.FILLING
            return seg

    def _sealed(self, seg):
        with self._cv:
            self._to_flush.append(seg)

    def _scratched(self, seg):
        with self._cv:
            self._blank.append(seg)
            self._cv.notify()

    def flush(self, sink):
        with self._cv:
            batch, self._to_flush = self._to_flush, []
            for seg in batch:
                sink(seg.number, seg.buf)
                seg.state = SegState.BLANK
                self._blank.append(seg)
            self._cv.notify_all()


def append_records(wal, records):
    seg = wal.start_segment()  # clean: sealed, or scratched when empty
    used = 0
    for rec in records:
        seg.buf[used : used + len(rec)] = rec
        used += len(rec)
    if used:
        seg.seal()
    else:
        seg.scratch()
    return used


def append_checkpoint_mark(wal, epoch, enabled):
    seg = wal.start_segment()  # leak: when disabled it is neither sealed nor scratched
    seg.buf[:8] = epoch.to_bytes(8, "little")
    if enabled:
        seg.seal()
    return epoch


class SegmentWriter:
    def __init__(self, wal):
        self.wal = wal
        self.seg = wal.start_segment()  # leak: roll on a full segment overwrites the field, the old one is not sealed
        self.pos = 0

    def put(self, rec):
        if self.pos + len(rec) > len(self.seg.buf):
            self.seg = self.wal.start_segment()  # leak: overwritten by the next roll without seal
            self.pos = 0
        self.seg.buf[self.pos : self.pos + len(rec)] = rec
        self.pos += len(rec)

    def close(self):
        self.seg.seal()


class IoCredits:
    def __init__(self, total):
        self.total = total
        self.left = total
        self._lock = threading.Lock()
        self.refused = 0

    def take(self, n=1):
        with self._lock:
            if n > self.left:
                self.refused += 1
                return False
            self.left -= n
            return True

    def refund(self, n=1):
        with self._lock:
            self.left = min(self.total, self.left + n)


def submit_batch(credits, ring, ops):
    if not credits.take(len(ops)):  # leak: the operations that the ring refuses are not refunded
        return 0
    done = 0
    for op in ops:
        if not ring.push(op):
            break
        done += 1
    credits.refund(done)
    return done


def submit_one(credits, ring, op):
    if not credits.take():  # clean: refunded by completion or at once
        return False
    if not ring.push(op, on_done=credits.refund):
        credits.refund()
        return False
    return True
