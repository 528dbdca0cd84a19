"""Reader of tokenised shards: mapped files, reference counts and shared memory."""
import logging
import mmap
import os
import threading
from bisect import bisect_right
from multiprocessing import shared_memory

import numpy as np

log = logging.getLogger(__name__)


class Mapped:
    def __init__(self, path, fd, mm):
        self.path = path
        self.fd = fd
        self.mm = mm
        self.users = 1

    def shut(self):
        self.mm.close()
        os.close(self.fd)


class MapCache:
    """Maps stay open while somebody uses them, plus a few idle ones."""

    def __init__(self, idle_limit=8):
        self.lock = threading.Lock()
        self.busy = {}
        self.idle = {}
        self.idle_limit = idle_limit

    def attach(self, path):
        with self.lock:
            m = self.busy.get(path)
            if m is not None:
                m.users += 1
                return m
            m = self.idle.pop(path, None)  # clean: near miss, moves from idle to busy and is returned
            if m is None:
                m = self._map(path)  # clean: in busy and returned
            m.users = 1
            self.busy[path] = m
            return m

    @staticmethod
    def _map(path):
        fd = os.open(path, os.O_RDONLY)  # leak: an empty shard raises with the descriptor open
        size = os.fstat(fd).st_size
        if size == 0:
            raise ValueError(f"{path} is empty")
        return Mapped(path, fd, mmap.mmap(fd, size, prot=mmap.PROT_READ))  # clean: owned by the returned object

    def detach(self, m):
        with self.lock:
            m.users -= 1
            if m.users:
                return
            del self.busy[m.path]
            if len(self.idle) < self.idle_limit:
                self.idle[m.path] = m
                return
        m.shut()

    def close(self):
        with self.lock:
            for m in self.idle.values():
                m.shut()
            self.idle.clear()


class ArenaSegments:
    """Shared memory segments by size class, for handing batches to workers."""

    def __init__(self, names, size):
        self.size = size
        self.spare = [shared_memory.SharedMemory(name=n, create=True, size=size) for n in names]
        self.given = {}
        self.lock = threading.Lock()

    def give(self, who):
        self.lock.acquire()  # leak: no spare segment raises with the lock held
        if not self.spare:
            raise BlockingIOError("no spare segment")
        seg = self.spare.pop()  # clean: returned and known in given
        self.given[seg.name] = who
        self.lock.release()
        return seg

    def give_or_none(self, who):
        if not self.lock.acquire(timeout=1.0):  # clean: near miss, the finally releases only after success
            return None
        try:
            if not self.spare:
                return None
            seg = self.spare.pop()  # clean: returned and known in given
            self.given[seg.name] = who
            return seg
        finally:
            self.lock.release()

    def reclaim(self, seg):
        with self.lock:
            self.given.pop(seg.name)
            self.spare.append(seg)

    def give_pair(self, who):
        a = self.give_or_none(who)  # clean: reclaimed when there is no second
        if a is None:
            return None
        b = self.give_or_none(who)  # clean: returned with the first
        if b is None:
            self.reclaim(a)
            return None
        return a, b


class Shard:
    """One file: header (n, offsets...) and uint16 tokens."""

    def __init__(self, cache, path):
        self.cache = cache
        self.path = path
        self.map = cache.attach(path)  # leak: a bad magic number raises out of __init__ and nobody detaches
        head = np.frombuffer(self.map.mm, dtype=np.int64, count=2)
        if head[0] != 0x5348:
            raise ValueError(f"{path}: bad magic")
        self.offsets = np.frombuffer(self.map.mm, dtype=np.int64, count=int(head[1]) + 1, offset=16).copy()
        del head

    def doc(self, i):
        lo, hi = self.offsets[i], self.offsets[i + 1]
        base = 16 + self.offsets.nbytes
        return np.frombuffer(self.map.mm, dtype=np.uint16, count=int(hi - lo), offset=int(base + 2 * lo)).copy()

    def __len__(self):
        return len(self.offsets) - 1

    def close(self):
        if self.map is not None:
            self.cache.detach(self.map)
            self.map = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class ShardSet:
    def __init__(self, cache, paths):
        self.cache = cache
        self.spare_view = None
        self.shards = []
        try:
            for p in paths:
                self.shards.append(Shard(cache, p))  # clean: near miss, close() closes each, also when a later one is bad
        except Exception:
            self.close()
            raise
        self.ends = np.cumsum([len(s) for s in self.shards]).tolist()

    def __getitem__(self, i):
        k = bisect_right(self.ends, i)
        return self.shards[k].doc(i - (self.ends[k - 1] if k else 0))

    def focus(self, path):
        """Keeps one map hot for random reads."""
        self.spare_view = self.cache.attach(path)  # leak: a second focus() overwrites the first map
        return self.spare_view.mm

    def unfocus(self):
        if self.spare_view is not None:
            self.cache.detach(self.spare_view)
            self.spare_view = None

    def close(self):
        self.unfocus()
        while self.shards:
            self.shards.pop().close()


def count_tokens(cache, paths, suffix=".bin"):
    total = 0
    for path in paths:
        m = cache.attach(path)  # leak: a file with another suffix continues attached
        if not path.endswith(suffix):
            log.info("skipped %s", path)
            continue
        total += len(m.mm) // 2
        cache.detach(m)
    return total


def iter_docs(cache, path, limit=None):
    s = Shard(cache, path)  # clean: near miss, return on the limit is inside the try
    try:
        for i in range(len(s)):
            if limit is not None and i >= limit:
                return
            yield s.doc(i)
    finally:
        s.close()


def iter_long_docs(cache, path, min_tokens):
    s = Shard(cache, path)  # leak: the bare return for a shard without long documents skips close
    longest = int(np.diff(s.offsets).max(initial=0))
    if longest < min_tokens:
        return
    for i in range(len(s)):
        d = s.doc(i)
        if len(d) >= min_tokens:
            yield d
    s.close()


def send_batch(segs, shards, idx, conn):
    """The receiver answers with the name when it has copied the batch."""
    seg = segs.give_or_none(conn)  # clean: near miss, reclaimed by await_reply() through the dict
    if seg is None:
        return False
    out = np.ndarray((segs.size // 2,), dtype=np.uint16, buffer=seg.buf)
    at = 0
    for i in idx:
        d = shards[i][: len(out) - at]
        out[at : at + len(d)] = d
        at += len(d)
    conn.pending[seg.name] = seg
    conn.send((seg.name, at))
    return True


def await_reply(segs, conn):
    name = conn.recv()
    segs.reclaim(conn.pending.pop(name))
