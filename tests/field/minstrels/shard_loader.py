"""Streaming loader for packed token shards (threads, no multiprocessing).

A shard is a pair of files, NAME.idx and NAME.bin. Reader threads open shards under a budget of file
descriptors, cut them into samples, copy each sample into a recycled bytearray and put it on a queue.
The trainer thread drains the queue, shuffles in a reservoir and collates.
"""
import logging
import os
import queue
import random
import struct
import threading

import numpy as np

log = logging.getLogger("shards")
MAGIC = b"TOKIDX02"


class BadShard(Exception):
    pass


class FdBudget:
    def __init__(self, n):
        self._sem = threading.Semaphore(n)

    def enter(self):
        self._sem.acquire()  # clean: handed to the caller, who calls leave()

    def try_enter(self, timeout):
        return self._sem.acquire(timeout=timeout)  # clean: handed to the caller, who calls leave()

    def leave(self):
        self._sem.release()


class Slabs:
    """Recycled bytearrays. Grows up to `cap`, afterwards get() waits."""

    def __init__(self, size, cap):
        self.size, self.cap, self.made = size, cap, 0
        self._q = queue.LifoQueue()
        self._lock = threading.Lock()

    def get(self):
        try:
            return self._q.get_nowait()  # clean: handed to the caller
        except queue.Empty:
            pass
        with self._lock:
            if self.made < self.cap:
                self.made += 1
                return bytearray(self.size)  # clean: handed to the caller
        return self._q.get()  # clean: handed to the caller

    def put(self, slab):
        self._q.put(slab)


class Shard:
    def __init__(self, path, fd, offsets, budget):
        self.path, self.fd, self.offsets, self.budget = path, fd, offsets, budget

    def __len__(self):
        return len(self.offsets) - 1

    def read_into(self, i, slab):
        a, b = int(self.offsets[i]), int(self.offsets[i + 1])
        n = min(b - a, len(slab))
        os.lseek(self.fd, a, os.SEEK_SET)
        slab[:n] = os.read(self.fd, n)
        return n

    def close(self):
        os.close(self.fd)
        self.budget.leave()


def read_index(path):
    f = open(path, "rb")  # leak: the wrong magic raises BadShard with the file open
    head = f.read(16)
    if head[:8] != MAGIC:
        raise BadShard("%s: magic is %r" % (path, head[:8]))
    (count,) = struct.unpack("<Q", head[8:])
    offsets = np.frombuffer(f.read(8 * (count + 1)), dtype="<u8")
    f.close()
    return offsets


def open_shard(stem, budget):
    """Returns an open Shard, or None where the shard is damaged and was logged."""
    budget.enter()  # leak: a damaged shard returns None without leave()
    fd = -1
    try:
        offsets = read_index(stem + ".idx")
        fd = os.open(stem + ".bin", os.O_RDONLY)  # clean: near miss, the Shard closes it, a short file closes it here
        if os.fstat(fd).st_size < offsets[-1]:
            raise BadShard("%s.bin is shorter than its index says" % stem)
        return Shard(stem, fd, offsets, budget)
    except (OSError, BadShard) as e:
        log.warning("shard dropped: %s", e)
        if fd >= 0:
            os.close(fd)
        return None


def probe_sizes(stems, budget):
    """Number of samples in each shard, for the progress bar. Does not insist."""
    sizes = {}
    for stem in stems:
        if not budget.try_enter(0.5):  # clean: the finally covers the continue as well
            sizes[stem] = -1
            continue
        try:
            with open(stem + ".idx", "rb") as f:  # clean: with
                head = f.read(16)
            if head[:8] != MAGIC:
                continue
            sizes[stem] = struct.unpack("<Q", head[8:])[0]
        except OSError:
            sizes[stem] = 0
        finally:
            budget.leave()
    return sizes


def reader(stems, budget, slabs, out, stop, min_len):
    for stem in stems:
        shard = open_shard(stem, budget)  # leak: stop returns out of the inner loop with the shard open
        if shard is None:
            continue
        for i in range(len(shard)):
            if stop.is_set():
                return
            slab = slabs.get()  # leak: samples shorter than min_len are skipped with the slab in hand
            n = shard.read_into(i, slab)
            if n < min_len:
                continue
            out.put((slab, n))
        shard.close()
    out.put(None)


def peek(stem, budget, slabs, n):
    """First n samples of a shard as arrays, for the data viewer."""
    shard = open_shard(stem, budget)  # clean: closed in finally
    if shard is None:
        return []
    got = []
    slab = slabs.get()  # clean: given back in finally together with the shard
    try:
        for i in range(min(n, len(shard))):
            k = shard.read_into(i, slab)
            if k == 0:
                raise BadShard("empty sample %d in %s" % (i, stem))
            got.append(np.frombuffer(bytes(slab[:k]), dtype="<u2"))
    finally:
        slabs.put(slab)
        shard.close()
    return got


class Reservoir:
    def __init__(self, slabs, size, seed):
        self.slabs, self.size = slabs, size
        self.items = []
        self.rng = random.Random(seed)

    def swap(self, item):
        """Takes one item in; returns another one once the reservoir is full."""
        if len(self.items) < self.size:
            self.items.append(item)
            return None
        j = self.rng.randrange(self.size)
        old = self.items[j]
        self.items[j] = item
        return old

    def drain(self):
        self.rng.shuffle(self.items)
        while self.items:
            yield self.items.pop()


def consume(q, readers, slabs, reservoir, seq_len):
    live = readers
    while live:
        item = q.get()
        if item is None:
            live -= 1
            continue
        old = reservoir.swap(item)
        if old is not None:
            yield to_tokens(old, slabs, seq_len)
    for item in reservoir.drain():
        yield to_tokens(item, slabs, seq_len)


def to_tokens(item, slabs, seq_len):
    slab, n = item
    arr = np.frombuffer(bytes(slab[:n]), dtype="<u2")[:seq_len]
    slabs.put(slab)
    if len(arr) < seq_len:
        arr = np.pad(arr, (0, seq_len - len(arr)))
    return arr


class Loader:
    def __init__(self, stems, threads, seq_len, fds=32, slab_bytes=1 << 16):
        self.seq_len = seq_len
        self.budget = FdBudget(fds)
        self.slabs = Slabs(slab_bytes, cap=1024)
        self.q = queue.Queue(256)
        self.stop = threading.Event()
        self.threads = []
        self.log_file = open("/tmp/loader.%d.log" % os.getpid(), "a")  # clean: kept on self and closed in shutdown()
        self.pad = self.slabs.get()  # leak: kept on self, shutdown() forgets to put it back
        for t in range(threads):
            part = stems[t::threads]
            args = (part, self.budget, self.slabs, self.q, self.stop, 2 * 16)
            self.threads.append(threading.Thread(target=reader, args=args, daemon=True))

    def batches(self, size, seed):
        for t in self.threads:
            t.start()
        res = Reservoir(self.slabs, 512, seed)
        batch = []
        for arr in consume(self.q, len(self.threads), self.slabs, res, self.seq_len):
            batch.append(arr)
            if len(batch) == size:
                self.log_file.write("batch of %d\n" % size)
                yield np.stack(batch)
                batch = []

    def shutdown(self):
        self.stop.set()
        while any(t.is_alive() for t in self.threads):
            try:
                item = self.q.get(timeout=0.1)
            except queue.Empty:
                continue
            if item is not None:
                self.slabs.put(item[0])
        self.log_file.close()
