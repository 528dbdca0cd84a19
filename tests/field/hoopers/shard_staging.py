"""Checkpoint loading through a pool of pinned staging buffers.

A reader thread pulls tensors out of shard files into host buffers, a copier
thread moves them to the device.  Saving goes the other way round.
"""
import contextlib
import json
import logging
import queue
import struct
import threading
import time
import zlib
from collections import deque, namedtuple

import torch

log = logging.getLogger("staging")

MAGIC = b"TSHD"
TensorMeta = namedtuple("TensorMeta", "name dtype shape offset nbytes crc")
Shard = namedtuple("Shard", "path priority")
Loaded = namedtuple("Loaded", "meta buf")
Failure = namedtuple("Failure", "meta error")
SaveJob = namedtuple("SaveJob", "name buf nbytes callback")

class StagingTimeout(Exception):
    pass

class ShardCorrupt(Exception):
    pass

class StagingBuffer:
    __slots__ = ("index", "data", "used")

    def __init__(self, index, nbytes):
        self.index = index
        self.data = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.used = 0

    @property
    def capacity(self):
        return self.data.numel()

class StagingPool:
    def __init__(self, sizes):
        self._q = queue.Queue()
        self._max = max(sizes)
        for i, nbytes in enumerate(sizes):
            self._q.put(StagingBuffer(i, nbytes))
        self._lock = threading.Lock()
        self.outstanding = 0
        self.wait_seconds = 0.0

    def _note(self, delta, waited=0.0):
        with self._lock:
            self.outstanding += delta
            self.wait_seconds += waited

    def borrow(self, nbytes, timeout=30.0):
        """Block until a buffer of at least nbytes is there."""
        if nbytes > self._max:
            raise ValueError(f"{nbytes} bytes do not fit any staging buffer")
        start = time.monotonic()
        while True:
            left = timeout - (time.monotonic() - start)
            try:
                buf = self._q.get(timeout=max(left, 0.001))  # clean: too small a buffer goes back before the next turn
            except queue.Empty:
                raise StagingTimeout(f"no buffer of {nbytes} bytes within {timeout}s") from None
            if buf.capacity >= nbytes:
                break
            self._q.put(buf)
            if left <= 0:
                raise StagingTimeout(f"no buffer of {nbytes} bytes within {timeout}s")
            time.sleep(0.002)
        buf.used = nbytes
        self._note(+1, time.monotonic() - start)
        return buf

    def try_borrow(self, nbytes):
        try:
            buf = self._q.get_nowait()  # leak: a buffer that is too small is neither returned nor put back
        except queue.Empty:
            return None
        if buf.capacity < nbytes:
            log.debug("buffer %d too small for %d bytes", buf.index, nbytes)
            return None
        buf.used = nbytes
        self._note(+1)
        return buf

    def give_back(self, buf):
        buf.used = 0
        self._note(-1)
        self._q.put(buf)

@contextlib.contextmanager
def borrowed(pool, nbytes):
    buf = pool.borrow(nbytes)  # clean: given back in the finally
    try:
        yield buf
    finally:
        pool.give_back(buf)

def parse_header(fh):
    """Return the list of TensorMeta, or None where this is no shard of ours."""
    head = fh.read(12)
    if len(head) < 12 or head[:4] != MAGIC:
        return None
    (length,) = struct.unpack("<Q", head[4:])
    entries = json.loads(fh.read(length))
    base = 12 + length
    return [TensorMeta(n, e["dtype"], tuple(e["shape"]), base + e["start"], e["nbytes"], e.get("crc"))
            for n, e in sorted(entries.items(), key=lambda kv: kv[1]["start"])]

def read_tensor(fh, meta, pool):
    buf = pool.borrow(meta.nbytes)  # leak: a short read raises ShardCorrupt and the caller has no buffer to return
    fh.seek(meta.offset)
    view = memoryview(buf.data.numpy())[:meta.nbytes]
    got = fh.readinto(view)
    if got != meta.nbytes:
        raise ShardCorrupt(f"{meta.name}: wanted {meta.nbytes} bytes, got {got}")
    return buf

def reader_main(shards, pool, ready, stop):
    for shard in sorted(shards, key=lambda s: s.priority):
        fh = open(shard.path, "rb", buffering=0)  # leak: the continue for a foreign file skips close
        header = parse_header(fh)
        if header is None:
            log.warning("%s is not a shard, skipped", shard.path)
            continue
        try:
            for meta in header:
                if stop.is_set():
                    return
                try:
                    buf = read_tensor(fh, meta, pool)  # clean: near miss, travels through the queue to the copier or to drain
                except (ShardCorrupt, StagingTimeout) as exc:
                    ready.put(Failure(meta, exc))
                    continue
                ready.put(Loaded(meta, buf))
        finally:
            fh.close()
    ready.put(None)

def copier_main(ready, pool, targets, failures):
    while True:
        item = ready.get()  # clean: the finally gives its buffer back, the other items have none
        if item is None:
            return
        if isinstance(item, Failure):
            failures.append(item)
            continue
        meta, buf = item
        try:
            dst = targets[meta.name]
            src = buf.data[:meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)
            dst.copy_(src, non_blocking=False)
        except KeyError as exc:
            failures.append(Failure(meta, exc))
        finally:
            pool.give_back(buf)

def load_checkpoint(shards, targets, pool, deadline):
    ready, stop, failures = queue.Queue(), threading.Event(), []
    reader = threading.Thread(target=reader_main, args=(shards, pool, ready, stop), daemon=True)
    copier = threading.Thread(target=copier_main, args=(ready, pool, targets, failures), daemon=True)
    reader.start()
    copier.start()
    reader.join(deadline)
    if reader.is_alive():
        stop.set()
        reader.join()
        ready.put(None)
    copier.join()
    while not ready.empty():
        left = ready.get_nowait()  # clean: only a Loaded item carries a buffer
        if isinstance(left, Loaded):
            pool.give_back(left.buf)
    return failures

def merge_halves(pool, fh, lo, hi, out):
    """Join a tensor that was split over two records."""
    first = pool.borrow(lo.nbytes)  # leak: the second borrow may raise StagingTimeout while this one is held
    second = pool.borrow(hi.nbytes)  # clean: given back in the finally
    try:
        for meta, buf in ((lo, first), (hi, second)):
            fh.seek(meta.offset)
            fh.readinto(memoryview(buf.data.numpy())[:meta.nbytes])
        out[:lo.nbytes].copy_(first.data[:lo.nbytes])
        out[lo.nbytes:].copy_(second.data[:hi.nbytes])
    finally:
        pool.give_back(first)
        pool.give_back(second)

def verify(path, pool):
    bad = []
    with open(path, "rb") as fh:  # clean: with statement
        for meta in parse_header(fh) or ():
            if meta.crc is None:
                continue
            with borrowed(pool, meta.nbytes) as buf:  # clean: with statement
                fh.seek(meta.offset)
                fh.readinto(memoryview(buf.data.numpy())[:meta.nbytes])
                if zlib.crc32(buf.data.numpy()[:meta.nbytes]) != meta.crc:
                    bad.append(meta.name)
    return bad

def upcast(pool, src, dst):
    buf = pool.try_borrow(dst.numel() * 4)  # clean: near miss, None means pageable memory and the finally tests for it
    scratch = torch.empty(dst.numel()) if buf is None else buf.data[:dst.numel() * 4].view(torch.float32)
    try:
        scratch.copy_(src.flatten())
        dst.copy_(scratch.view(dst.shape))
    finally:
        if buf is not None:
            pool.give_back(buf)

class AsyncSaver:
    def __init__(self, pool, fh):
        self.pool = pool
        self.fh = fh
        self._jobs = deque()
        self._written = {}

    def submit(self, name, tensor):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        buf = self.pool.borrow(flat.numel())  # leak: run_once returns for a name already written and never calls the callback
        buf.data[:flat.numel()].copy_(flat, non_blocking=True)
        self._jobs.append(SaveJob(name, buf, flat.numel(), self._on_written))

    def _on_written(self, job):
        self.pool.give_back(job.buf)

    def run_once(self):
        if not self._jobs:
            return False
        job = self._jobs.popleft()
        if job.name in self._written:
            log.info("%s is in the file already (tied weights)", job.name)
            return True
        self._written[job.name] = self.fh.tell()
        self.fh.write(memoryview(job.buf.data.numpy())[:job.nbytes])
        job.callback(job)
        return True

    def flush(self):
        while self.run_once():
            pass
        self.fh.flush()
