"""Threaded shard loader that stages batches in page-locked host memory.

A fixed ring of pinned buffers is allocated once.  Reader threads fill buffers from
shards on disk, the training loop copies them to the device on a side stream, and a
buffer may be used again once the copy that reads it has finished.
"""
import contextlib
import queue
import struct
import threading
import time
import zlib
from collections import deque, namedtuple

import torch

HEADER = struct.Struct("<4sIII")
Batch = namedtuple("Batch", "path buf nbytes")


class CorruptShard(Exception):
    pass


class PinnedBuf:
    __slots__ = ("data", "capacity", "serial")

    def __init__(self, capacity, serial):
        self.data = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
        self.capacity = capacity
        self.serial = serial


class PinnedRing:
    def __init__(self, sizes):
        self._free = [PinnedBuf(s, i) for i, s in enumerate(sizes)]
        self._cv = threading.Condition()
        self.waits = 0
        self.waited_s = 0.0

    def take(self, timeout=None):
        began = time.perf_counter()
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._free), timeout):
                return None
            self.waits += 1
            self.waited_s += time.perf_counter() - began
            return self._free.pop()  # clean: handed to the caller

    def take_sized(self, nbytes):
        with self._cv:
            aside = []
            try:
                while self._free:
                    buf = self._free.pop()  # clean: near miss, buffers that are too small go back in the finally
                    if buf.capacity >= nbytes:
                        return buf
                    aside.append(buf)
                return None
            finally:
                self._free.extend(aside)

    def give(self, buf):
        with self._cv:
            self._free.append(buf)
            self._cv.notify()

    @contextlib.contextmanager
    def borrowed(self):
        buf = self.take()  # clean: the finally gives it back
        try:
            yield buf
        finally:
            self.give(buf)


class LoaderStats:
    def __init__(self):
        self.shards = 0
        self.bad = 0
        self.bytes = 0
        self.too_big = 0

    def as_dict(self):
        return dict(vars(self))


class ShardLoader:
    def __init__(self, paths, ring, device, n_readers=4, checksum=True, keep_scratch=False):
        self.ring = ring
        self.device = device
        self.checksum = checksum
        self.stats = LoaderStats()
        self._paths = queue.Queue()
        for p in paths:
            self._paths.put(p)
        for _ in range(n_readers):
            self._paths.put(None)
        self._out = queue.Queue(maxsize=n_readers * 2)
        self._stop = threading.Event()
        self._copy_stream = torch.cuda.Stream(device)
        self._inflight = deque()
        self._by_domain = {}
        self._scratch = None
        if keep_scratch:
            self._scratch = ring.take()  # clean: near miss, close() gives it back when it is set
        self._threads = [threading.Thread(target=self._read_loop, args=(i,), daemon=True) for i in range(n_readers)]

    def start(self):
        for t in self._threads:
            t.start()
        return self

    # -- reader side -------------------------------------------------------

    def _fill(self, buf, path):
        with open(path, "rb") as fh:  # clean: closed by the with
            magic, version, nbytes, crc = HEADER.unpack(fh.read(HEADER.size))
            if magic != b"SHRD" or version > 3:
                raise CorruptShard(f"{path}: bad header {magic!r} v{version}")
            if nbytes > buf.capacity:
                self.stats.too_big += 1
                raise CorruptShard(f"{path}: {nbytes} bytes do not fit")
            view = memoryview(buf.data.numpy())[:nbytes]
            fh.readinto(view)
        if self.checksum and zlib.crc32(view) != crc:
            raise CorruptShard(f"{path}: checksum")
        return nbytes

    def _read_loop(self, wid):
        while not self._stop.is_set():
            path = self._paths.get()
            if path is None:
                break
            buf = self.ring.take(timeout=5.0)  # leak: _fill raises CorruptShard and the handler goes on without giving back
            if buf is None:
                self._paths.put(path)
                continue
            try:
                nbytes = self._fill(buf, path)
            except CorruptShard as exc:
                self.stats.bad += 1
                print(f"[reader {wid}] {exc}")
                continue
            self.stats.shards += 1
            self.stats.bytes += nbytes
            self._out.put(Batch(path, buf, nbytes))
        self._out.put(None)

    # -- training side -----------------------------------------------------

    def _reap(self, block=False):
        while self._inflight:
            event, buf = self._inflight[0]
            if not block and not event.query():
                return
            event.synchronize()
            self._inflight.popleft()
            self.ring.give(buf)

    def _to_device(self, batch):
        with torch.cuda.stream(self._copy_stream):
            out = batch.buf.data[:batch.nbytes].to(self.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._copy_stream)
        self._inflight.append((event, batch.buf))
        return out

    def __iter__(self):
        live = len(self._threads)
        while live:
            self._reap()
            batch = self._out.get()
            if batch is None:
                live -= 1
                continue
            yield self._to_device(batch)
        self._reap(block=True)

    def _read_now(self, path, nbytes):
        """Read one shard outside of the loop; the buffer belongs to whoever calls."""
        buf = self.ring.take_sized(nbytes)  # clean: returned inside the batch
        if buf is None:
            return None
        with open(path, "rb") as fh:  # clean: closed by the with
            n = fh.readinto(memoryview(buf.data.numpy())[:nbytes])
        return Batch(path, buf, n)

    def peek(self, path, nbytes):
        head = self._read_now(path, nbytes)  # leak: the return for a short head keeps the buffer of the batch
        if head is None:
            return b""
        if head.nbytes < HEADER.size:
            return b""
        raw = bytes(head.buf.data[:HEADER.size].numpy())
        self.ring.give(head.buf)
        return raw

    def gather(self, path, nbytes):
        """Copy a shard that may be larger than the usual buffer."""
        buf = self.ring.take()  # leak: the name is bound to the larger buffer and the first one is forgotten
        if nbytes > buf.capacity:
            buf = self.ring.take_sized(nbytes)  # clean: near miss, None is raised on, otherwise the finally gives it back
            if buf is None:
                raise MemoryError(f"{path}: no pinned buffer of {nbytes} bytes")
        try:
            self._fill(buf, path)
            return buf.data[:nbytes].clone()
        finally:
            self.ring.give(buf)

    def assign_domain(self, domain):
        """Each mixture domain stages through its own buffer."""
        buf = self.ring.take()  # leak: assigning a domain again overwrites the entry, close() sees only the last
        buf.data.zero_()
        self._by_domain[domain] = buf
        return buf.serial

    def digest(self, path, pin=True):
        buf = self.ring.take() if pin else None  # leak: the release also asks for a non-empty shard, the acquire does not
        data = buf.data.numpy() if pin else bytearray(1 << 20)
        total, crc = 0, 0
        with open(path, "rb") as fh:  # clean: closed by the with
            while True:
                n = fh.readinto(data)
                if not n:
                    break
                total += n
                crc = zlib.crc32(memoryview(data)[:n], crc)
        if pin and total:
            self.ring.give(buf)
        return total, crc

    def zero_fill(self, out):
        with self.ring.borrowed() as buf:  # clean: the context manager gives it back
            buf.data.zero_()
            out.copy_(buf.data[:out.numel()].view_as(out))

    def close(self):
        self._stop.set()
        live = sum(t.is_alive() for t in self._threads)
        while live:
            try:
                batch = self._out.get(timeout=1.0)
            except queue.Empty:
                live = sum(t.is_alive() for t in self._threads)
                continue
            if batch is None:
                live -= 1
            else:
                self.ring.give(batch.buf)
        self._reap(block=True)
        for buf in self._by_domain.values():
            self.ring.give(buf)
        self._by_domain.clear()
        if self._scratch is not None:
            self.ring.give(self._scratch)
            self._scratch = None
