"""Pinned host staging for weight uploads, result downloads and packed batches."""
from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from contextlib import contextmanager

import torch

log = logging.getLogger("staging")
KB, MB = 1 << 10, 1 << 20
_CLASSES = (64 * KB, 512 * KB, 4 * MB, 32 * MB)


class StagingTimeout(RuntimeError): ...


def size_class(n: int) -> int:
    return next((c for c in _CLASSES if n <= c), -(-n // (32 * MB)) * 32 * MB)


def nbytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


class HostBuf:
    __slots__ = ("cap", "mem", "used", "event", "meta")

    def __init__(self, cap: int):
        self.cap, self.used, self.event, self.meta = cap, 0, None, None
        self.mem = torch.empty(cap, dtype=torch.uint8, pin_memory=True)

    def as_tensor(self, shape, dtype):
        n = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        return self.mem[:n].view(dtype).view(shape)

    def load(self, t):
        self.meta = (tuple(t.shape), t.dtype)
        self.as_tensor(*self.meta).copy_(t)


class PinnedPool:
    def __init__(self, budget: int):
        self._free = {c: deque() for c in _CLASSES}
        self._cv = threading.Condition()
        self.budget, self.reserved, self.out = budget, 0, 0

    def take(self, n: int, timeout: float | None = None) -> HostBuf | None:
        c = size_class(n)
        end = None if timeout is None else time.monotonic() + timeout
        with self._cv:
            while True:
                idle = self._free.setdefault(c, deque())
                if idle:
                    buf = idle.popleft()  # clean: returned to the caller
                    break
                if self.reserved + c <= self.budget:
                    buf = HostBuf(c)
                    self.reserved += c
                    break
                if self._steal(c):
                    continue
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._cv.wait(left)
            self.out += 1
        buf.used = n
        return buf

    def _steal(self, want: int) -> bool:
        """Turn an idle buffer of another class back into budget."""
        for c in sorted(self._free, reverse=True):
            if c == want or not self._free[c]:
                continue
            victim = self._free[c].popleft()  # leak: a victim smaller than wanted is dropped and its bytes stay in reserved
            victim.mem = None
            if c < want:
                return False
            self.reserved -= c
            return True
        return False

    def give(self, buf: HostBuf) -> None:
        buf.used, buf.event, buf.meta = 0, None, None
        with self._cv:
            self._free[buf.cap].append(buf)
            self.out -= 1
            self._cv.notify()


@contextmanager
def staged(pool: PinnedPool, n: int, timeout: float = 5.0):
    buf = pool.take(n, timeout)  # clean: given back in the finally
    if buf is None:
        raise StagingTimeout(f"no {n} byte buffer in {timeout}s")
    try:
        yield buf
    finally:
        pool.give(buf)


class Job:
    __slots__ = ("name", "src", "dst", "cancelled", "done", "err")

    def __init__(self, name, src, dst):
        self.name, self.src, self.dst, self.err = name, src, dst, None
        self.cancelled, self.done = threading.Event(), threading.Event()

    def finish(self, err=None):
        self.err = err
        self.done.set()


class Uploader(threading.Thread):
    def __init__(self, pool, jobs, device, depth=4, patience=2.0):
        super().__init__(daemon=True, name=f"upload-{device}")
        self.pool, self.jobs, self.device = pool, jobs, device
        self.depth, self.patience, self.inflight = depth, patience, deque()
        self.stream = torch.cuda.Stream(device)

    def run(self):
        torch.cuda.set_device(self.device)
        while (job := self.jobs.get()) is not None:
            try:
                self._one(job)
            except StagingTimeout as e:
                job.finish(e)
            self._reap(block=len(self.inflight) > self.depth)
        self._reap(block=True)

    def _one(self, job: Job):
        buf = self.pool.take(nbytes(job.src), self.patience)  # leak: a job cancelled while it was loaded returns with the buffer
        if buf is None:
            raise StagingTimeout(job.name)
        buf.load(job.src)
        if job.cancelled.is_set():
            job.finish()
            return
        with torch.cuda.stream(self.stream):
            job.dst.copy_(buf.as_tensor(*buf.meta), non_blocking=True)
            buf.event = self.stream.record_event()
        self.inflight.append((buf, job))

    def _reap(self, block: bool):
        while self.inflight:
            buf, job = self.inflight[0]
            if not block and not buf.event.query():
                return
            buf.event.synchronize()
            self.inflight.popleft()
            self.pool.give(buf)
            job.finish()


class Fetcher:
    def __init__(self, pool, stream):
        self.pool, self.stream, self.pending = pool, stream, {}

    def start(self, key, t) -> bool:
        if key in self.pending:
            return False
        buf = self.pool.take(nbytes(t), timeout=0.5)  # clean: near miss, sits in pending until collect() or close()
        if buf is None:
            return False
        buf.meta = (tuple(t.shape), t.dtype)
        with torch.cuda.stream(self.stream):
            buf.as_tensor(*buf.meta).copy_(t, non_blocking=True)
            buf.event = self.stream.record_event()
        self.pending[key] = buf
        return True

    def collect(self, key):
        buf = self.pending.pop(key)
        buf.event.synchronize()
        out = buf.as_tensor(*buf.meta).clone()
        self.pool.give(buf)
        return out

    def close(self):
        while self.pending:
            _, buf = self.pending.popitem()
            buf.event.synchronize()
            self.pool.give(buf)


class Packer:
    def __init__(self, pool, cap):
        self.pool, self.off, self.rows = pool, 0, []
        self.buf = pool.take(cap)  # leak: _grow() puts a bigger one in its place and never gives this one back

    def add(self, t):
        n = nbytes(t)
        if self.off + n > self.buf.cap:
            self._grow(self.off + n)
        self.buf.mem[self.off:self.off + n].copy_(t.reshape(-1).view(torch.uint8))
        self.rows.append((self.off, n))
        self.off += n

    def _grow(self, need):
        bigger = self.pool.take(2 * need)  # leak: the next _grow() overwrites it in turn
        bigger.mem[:self.off].copy_(self.buf.mem[:self.off])
        self.buf = bigger

    def seal(self):
        buf, self.buf = self.buf, None
        buf.used = self.off
        return buf


def upload_rows(pool, rows, dst):
    pk = Packer(pool, 512 * KB)  # clean: sealed below, and the sealed buffer is given back
    for r in rows:
        pk.add(r)
    buf = pk.seal()
    dst[:buf.used].copy_(buf.mem[:buf.used], non_blocking=True)
    torch.cuda.current_stream().synchronize()
    pool.give(buf)
    return pk.rows


def checksum(pool, t) -> int:
    with staged(pool, nbytes(t)) as buf:  # clean: the context manager gives back
        buf.load(t.cpu())
        return zlib.crc32(buf.mem[:nbytes(t)].numpy())


def gather_to_host(pool, tensors):
    held: list[HostBuf] = []
    for t in tensors:
        buf = pool.take(nbytes(t), timeout=1.0)  # clean: near miss, all of held is given back on a timeout, else returned
        if buf is None:
            for h in held:
                pool.give(h)
            raise StagingTimeout(f"{len(held)} of {len(tensors)} gathered")
        buf.load(t.cpu())
        held.append(buf)
    return held


def dump(pool, tensors, path) -> bool:
    try:
        bufs = gather_to_host(pool, tensors)  # leak: on OSError we log and return with all of them
    except StagingTimeout as e:
        log.warning("dump skipped: %s", e)
        return False
    try:
        with open(path, "wb") as f:  # clean: closed by the with
            for b in bufs:
                f.write(b.mem[:b.used].numpy())
    except OSError as e:
        log.error("dump to %s: %s", path, e)
        return False
    for b in bufs:
        pool.give(b)
    return True
