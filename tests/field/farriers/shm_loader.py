"""Shared-memory batch ring between tokenizer workers and the training rank."""
import multiprocessing as mp
import time
from multiprocessing import shared_memory

import numpy as np
import torch


class Segment(object):
    def __init__(self, name, nbytes, create):
        self.shm = shared_memory.SharedMemory(name=name, create=create, size=nbytes if create else 0)
        self.arr = np.frombuffer(self.shm.buf, dtype=np.int32)

    def detach(self):
        self.arr = None
        self.shm.close()


class SegmentRing(object):
    """Fixed set of segments; indices travel through a queue so that workers can share it."""

    def __init__(self, prefix, depth, nbytes):
        self.prefix = prefix
        self.depth = depth
        self.nbytes = nbytes
        self._idx = mp.Queue()
        for i in range(depth):
            self._idx.put(i)

    def grab(self, timeout=None):
        try:
            return self._idx.get(timeout=timeout)
        except Exception:
            return None

    def drop(self, i):
        self._idx.put(i)

    def attach(self, i):
        return Segment("%s_%d" % (self.prefix, i), self.nbytes, create=False)


def worker_loop(ring, shards, ready, stop, seqlen):
    for shard in shards:
        if stop.is_set():
            break
        i = ring.grab(timeout=60)  # leak: a shard too short for a row is skipped with the index still held
        if i is None:
            break
        seg = ring.attach(i)  # clean: near miss, detached on the skip and after the copy
        toks = np.load(shard, mmap_mode="r")
        if toks.size < seqlen:
            seg.detach()
            continue
        n = min(toks.size // seqlen * seqlen, seg.arr.size)
        seg.arr[:n] = toks[:n]
        seg.detach()
        ready.put((i, n))
    ready.put(None)


def worker_loop_packed(ring, docs, ready, seqlen, eos):
    i = ring.grab()  # clean: near miss, published when it fills up and dropped at the end if still empty
    seg = ring.attach(i)  # clean: near miss, each rebind comes after a detach and the last is detached at the end
    pos = 0
    for doc in docs:
        if len(doc) + 1 > seg.arr.size:
            continue
        if pos + len(doc) + 1 > seg.arr.size:
            seg.detach()
            ready.put((i, pos // seqlen * seqlen))
            i = ring.grab()  # clean: near miss, the previous index was published one line up
            seg = ring.attach(i)  # clean: near miss, the previous mapping was detached just above
            pos = 0
        seg.arr[pos : pos + len(doc)] = doc
        seg.arr[pos + len(doc)] = eos
        pos += len(doc) + 1
    seg.detach()
    if pos >= seqlen:
        ready.put((i, pos // seqlen * seqlen))
    else:
        ring.drop(i)
    ready.put(None)


class ShmLoader(object):
    def __init__(self, ring, ready, nworkers, seqlen, device="cuda"):
        self.ring = ring
        self.ready = ready
        self.nworkers = nworkers
        self.seqlen = seqlen
        self.device = device
        self._maps = {}
        self._carry = None

    def _map(self, i):
        seg = self._maps.get(i)
        if seg is None:
            seg = self.ring.attach(i)  # clean: near miss, one mapping per index in the cache that close empties
            self._maps[i] = seg
        return seg

    def __iter__(self):
        left = self.nworkers
        while left:
            item = self.ready.get()
            if item is None:
                left -= 1
                continue
            i, n = item
            try:
                x = torch.from_numpy(self._map(i).arr[:n].reshape(-1, self.seqlen).copy())
            finally:
                self.ring.drop(i)
            yield x.to(self.device, non_blocking=True)

    def peek(self, i):
        seg = self.ring.attach(i)  # leak: the head is copied out of the fresh mapping, which nobody detaches
        return seg.arr[: self.seqlen].tolist()

    def close(self):
        while self._maps:
            _, seg = self._maps.popitem()
            seg.detach()


class EvalFeeder(object):
    """Main-process producer used for the held-out set."""

    def __init__(self, ring, seqlen):
        self.ring = ring
        self.seqlen = seqlen
        self._pending = []

    def rows(self, corpus):
        for toks in corpus:
            i = self.ring.grab(timeout=5)  # leak: the yield has no finally, a consumer that breaks early strands the index
            if i is None:
                return
            seg = self.ring.attach(i)  # clean: near miss, detached before the yield
            n = min(len(toks), seg.arr.size)
            seg.arr[:n] = toks[:n]
            seg.detach()
            yield i, n
            self.ring.drop(i)

    def rows_safe(self, corpus):
        for toks in corpus:
            i = self.ring.grab(timeout=5)  # clean: near miss, the finally also runs when the consumer breaks
            if i is None:
                return
            try:
                yield i, min(len(toks), self.ring.nbytes // 4)
            finally:
                self.ring.drop(i)

    def first_batches(self, corpus, limit):
        seen = []
        for i, n in self.rows(corpus):
            seen.append((i, n))
            if len(seen) == limit:
                break
        return seen

    def count_tokens(self, corpus, limit):
        total = 0
        for _, n in self.rows_safe(corpus):
            total += n
            if total >= limit:
                break
        return total

    def defer(self, toks):
        i = self.ring.grab(timeout=5)  # leak: flush gives back only the rows that are not empty and forgets the rest
        if i is None:
            return False
        self._pending.append((i, len(toks)))
        return True

    def flush(self, sink):
        for i, n in self._pending:
            if n > 0:
                sink(i, n)
                self.ring.drop(i)
        self._pending = []


def wait_idle(ring, timeout):
    deadline = time.monotonic() + timeout
    held = []
    while len(held) < ring.depth and time.monotonic() < deadline:
        i = ring.grab(timeout=0.1)  # clean: near miss, all that were gathered are dropped again below
        if i is not None:
            held.append(i)
    idle = len(held) == ring.depth
    for i in held:
        ring.drop(i)
    return idle
