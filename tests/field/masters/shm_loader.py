"""Batches from worker processes through shared memory.

The block is divided into slots. Free slot numbers are in one queue, filled ones in another;
a slot number that is in neither is with a worker or with a Batch of the trainer.
"""
import io
import logging
import multiprocessing as mp
import queue
import struct
import time
from collections import deque
from multiprocessing.shared_memory import SharedMemory

import numpy as np
from PIL import Image

log = logging.getLogger("shm")
MAGIC = 0x53484D31
HEAD = struct.Struct("<IIIQ")      # magic, rows, width, bytes
END = -1


class DecodeError(ValueError):
    pass


def decode(raw, width):
    if raw[:2] != b"\xff\xd8":
        raise DecodeError("not a jpeg")
    img = Image.open(io.BytesIO(raw)).convert("RGB").resize((width, width))
    return np.asarray(img, dtype=np.uint8)


def worker(name, slot_bytes, nslots, tasks, free_q, ready_q, width, wid):
    shm = SharedMemory(name=name)  # leak: a block that does not carry our magic is not closed
    if HEAD.unpack_from(shm.buf, 0)[0] != MAGIC:
        ready_q.put((END, wid))
        return
    bad = 0
    try:
        while (task := tasks.get()) is not None:
            slot = free_q.get()  # leak: a sample that cannot be decoded goes on to the next task without the slot
            base = HEAD.size + slot * slot_bytes
            rows, used = 0, 0
            try:
                for path in task:
                    with open(path, "rb") as f:  # clean: closed by the with
                        arr = decode(f.read(), width)
                    dst = np.ndarray(arr.shape, np.uint8, shm.buf, base + HEAD.size + used)
                    dst[:] = arr
                    used += arr.nbytes
                    rows += 1
            except DecodeError as e:
                bad += 1
                log.debug("worker %d: %s", wid, e)
                continue
            HEAD.pack_into(shm.buf, base, MAGIC, rows, width, used)
            ready_q.put((slot, wid))
    finally:
        ready_q.put((END, wid))
        shm.close()
        log.info("worker %d leaves, %d bad batches", wid, bad)


class Batch:
    """A view into a slot. release() gives the slot back, once."""

    __slots__ = ("loader", "slot", "data", "holds")

    def __init__(self, loader, slot, data):
        self.loader, self.slot, self.data, self.holds = loader, slot, data, 1

    def hold(self):
        self.holds += 1
        return self

    def release(self):
        self.holds -= 1
        if self.holds == 0:
            self.data = None
            self.loader.free_q.put(self.slot)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()


class ShmLoader:
    def __init__(self, files, batch, width, nslots=16, nworkers=4):
        self.files, self.batch, self.width = files, batch, width
        self.slot_bytes = HEAD.size + batch * width * width * 3
        self.shm = SharedMemory(create=True, size=HEAD.size + nslots * self.slot_bytes)  # clean: closed and unlinked in close()
        HEAD.pack_into(self.shm.buf, 0, MAGIC, nslots, width, 0)
        ctx = mp.get_context("spawn")
        self.tasks, self.free_q, self.ready_q = ctx.Queue(), ctx.Queue(), ctx.Queue()
        for i in range(nslots):
            self.free_q.put(i)
        self.alive = nworkers
        self.procs = [ctx.Process(target=worker, daemon=True, args=(
            self.shm.name, self.slot_bytes, nslots, self.tasks, self.free_q, self.ready_q, width, w)) for w in range(nworkers)]
        for p in self.procs:
            p.start()
        self.waited = 0.0

    def feed(self, epoch):
        order = np.random.default_rng(epoch).permutation(len(self.files))
        for i in range(0, len(order) - self.batch + 1, self.batch):
            self.tasks.put([self.files[j] for j in order[i:i + self.batch]])
        for _ in self.procs:
            self.tasks.put(None)

    def next(self, timeout=60.0):
        """The next batch, or None when all workers have left."""
        t0 = time.perf_counter()
        while self.alive:
            slot, wid = self.ready_q.get(timeout=timeout)  # clean: near miss, END is no slot, and a slot moves into the batch
            if slot == END:
                self.alive -= 1
                continue
            self.waited += time.perf_counter() - t0
            base = HEAD.size + slot * self.slot_bytes
            magic, rows, w, used = HEAD.unpack_from(self.shm.buf, base)
            return Batch(self, slot, np.ndarray((rows, w, w, 3), np.uint8, self.shm.buf, base + HEAD.size))
        return None

    def __iter__(self):
        while True:
            b = self.next()  # clean: released when the consumer comes back or leaves the loop
            if b is None:
                return
            try:
                yield b
            finally:
                b.release()

    def close(self):
        for p in self.procs:
            p.join(5)
        self.shm.close()
        self.shm.unlink()


class Ahead:
    """Keeps n batches at hand, so that a slow worker isn't noticed."""

    def __init__(self, loader, n):
        self.loader, self.n, self.q = loader, n, deque()

    def pull(self):
        while len(self.q) < self.n:
            b = self.loader.next()  # leak: reset() clears the queue and releases nothing
            if b is None:
                break
            self.q.append(b)
        return self.q.popleft() if self.q else None

    def reset(self, epoch):
        self.q.clear()
        self.loader.feed(epoch)

    def drain(self):
        while self.q:
            self.q.popleft().release()


class Mixup:
    def __init__(self, loader, alpha, seed=0):
        self.loader, self.alpha, self.rng = loader, alpha, np.random.default_rng(seed)
        self.prev = None

    def pair(self):
        a = self.loader.next()  # leak: at the end of the epoch there is no partner and a isn't released
        if a is None:
            return None
        b = self.loader.next()  # clean: released below
        if b is None:
            return None
        lam = self.rng.beta(self.alpha, self.alpha)
        x = lam * a.data.astype(np.float32) + (1 - lam) * b.data.astype(np.float32)
        a.release()
        b.release()
        return x

    def with_previous(self):
        """Mix with the batch of the call before."""
        cur = self.loader.next()  # clean: near miss, becomes prev, which is released one call later or in close()
        if cur is None:
            return None
        old, self.prev = self.prev, cur
        if old is None:
            return cur.data.astype(np.float32)
        n = min(len(old.data), len(cur.data))
        x = 0.5 * old.data[:n].astype(np.float32) + 0.5 * cur.data[:n]
        old.release()
        return x

    def close(self):
        if self.prev is not None:
            self.prev.release()
            self.prev = None


def mean_std(loader, limit=100):
    n, s, sq = 0, 0.0, 0.0
    for i, b in enumerate(loader):
        if i == limit:
            break
        x = b.data.astype(np.float64)
        n, s, sq = n + x.size, s + x.sum(), sq + (x * x).sum()
    return s / n, (sq / n - (s / n) ** 2) ** 0.5


def fan_out(loader, sinks):
    """The same batch for several consumers (EMA teacher, student, logger)."""
    while (b := loader.next()) is not None:  # clean: near miss, a hold for each sink and our own is released at the end
        for put in sinks:
            try:
                put(b.hold())  # leak: a sink that is full does not take the batch, and its hold is never released
            except queue.Full:
                log.debug("sink %r is full", put)
        b.release()


def bench(loader, n=50):
    t0 = time.perf_counter()
    first = None
    for _ in range(n):
        with loader.next() as b:  # clean: released on exit
            if first is None:
                first = b.data.mean()
    return n / (time.perf_counter() - t0), first
