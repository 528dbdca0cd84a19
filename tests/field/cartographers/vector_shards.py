"""Read side of the vector store: memory-mapped shard files, pins, result heaps."""
import heapq
import logging
import mmap
import os
import threading
from collections import OrderedDict

import numpy as np

LOG = logging.getLogger("vectors")


class Shard:
    def __init__(self, path, dim):
        self.path = path
        self.dim = dim
        self.pins = 0
        self.doomed = False
        self._fd = os.open(path, os.O_RDONLY)  # clean: closed by unload(), or here when it can not be mapped
        try:
            self._map = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)  # clean: closed by unload()
        except ValueError:
            os.close(self._fd)
            raise
        self.vectors = np.frombuffer(self._map, dtype=np.float32).reshape(-1, dim)

    def unload(self):
        self.vectors = None
        self._map.close()
        os.close(self._fd)


class ShardTable:
    """Open shards by name; unpinned ones stay until room is needed."""

    def __init__(self, root, dim, cap):
        self.root = root
        self.dim = dim
        self.cap = cap
        self._open = OrderedDict()
        self._mu = threading.RLock()

    def pin(self, name):
        with self._mu:
            shard = self._open.get(name)
            if shard is None:
                self._make_room()
                shard = Shard(os.path.join(self.root, name), self.dim)
                self._open[name] = shard
            self._open.move_to_end(name)
            shard.pins += 1
            return shard

    def pin_if_open(self, name):
        with self._mu:
            shard = self._open.get(name)
            if shard is None or shard.doomed:
                return None
            shard.pins += 1
            return shard

    def unpin(self, shard):
        with self._mu:
            shard.pins -= 1
            if shard.doomed and shard.pins == 0:
                shard.unload()

    def _make_room(self):
        while len(self._open) >= self.cap:
            for name, s in self._open.items():
                if s.pins == 0:
                    break
            else:
                return
            self._open.pop(name).unload()

    def doom(self, name):
        with self._mu:
            shard = self._open.pop(name, None)
            if shard is None:
                return
            shard.doomed = True
            if shard.pins == 0:
                shard.unload()


class Pinned:
    def __init__(self, table, name, strict=True):
        self.table = table
        self.name = name
        self.strict = strict
        self.shard = None

    def __enter__(self):
        self.shard = self.table.pin(self.name)  # clean: unpinned by __exit__ before it decides on the error
        return self.shard

    def __exit__(self, et, ev, tb):
        shard, self.shard = self.shard, None
        self.table.unpin(shard)
        if et is ValueError and not self.strict:
            return True
        return False


class HeapStock:
    """Reusable top-k heaps."""

    def __init__(self):
        self._stock = []

    def borrow(self, k):
        h = self._stock.pop() if self._stock else []
        h.clear()
        h.extend([(-np.inf, -1)] * k)
        return h

    def bring(self, h):
        self._stock.append(h)


class Searcher:
    def __init__(self, table, heaps, names):
        self.table = table
        self.heaps = heaps
        self.names = names
        self.sticky = {}
        self._scan_lock = threading.Lock()

    def _push(self, heap, shard, q):
        scores = shard.vectors @ q
        for i in np.argpartition(scores, -len(heap))[-len(heap):]:
            heapq.heappushpop(heap, (float(scores[i]), int(i)))

    def search(self, q, k):
        heap = self.heaps.borrow(k)  # clean: brought back in finally
        try:
            for name in self.names:
                with Pinned(self.table, name) as shard:  # clean: context manager
                    self._push(heap, shard, q)
            return sorted(heap, reverse=True)
        finally:
            self.heaps.bring(heap)

    def search_hot(self, q, k):
        """Only what is open already."""
        heap = self.heaps.borrow(k)  # clean: brought back at the end
        for name in self.names:
            shard = self.table.pin_if_open(name)  # leak: an empty shard is skipped while pinned
            if shard is None:
                continue
            if len(shard.vectors) < k:
                continue
            self._push(heap, shard, q)
            self.table.unpin(shard)
        result = sorted(heap, reverse=True)
        self.heaps.bring(heap)
        return result

    def _rank(self, shard, q, k):
        heap = self.heaps.borrow(k)  # clean: returned to the caller
        self._push(heap, shard, q)
        heap.sort(reverse=True)
        return heap

    def best_of(self, name, q):
        with Pinned(self.table, name) as shard:  # clean: context manager
            top = self._rank(shard, q, 1)  # clean: near miss, brought back after the value is read
            best = top[0]
            self.heaps.bring(top)
            return best

    def preview(self, name, q, k):
        with Pinned(self.table, name, strict=False) as shard:  # clean: near miss, swallows ValueError after the unpin
            return list(self._rank(shard, q, k))  # leak: heap copied and dropped
        return []

    def fetch(self, name, ids):
        shard = self.table.pin(name)  # leak: not unpinned when an id is out of range
        if max(ids) >= len(shard.vectors):
            LOG.warning("id out of range in %s", name)
            return None
        rows = shard.vectors[ids].copy()
        self.table.unpin(shard)
        return rows

    def stick(self, name):
        if name not in self.sticky:
            self.sticky[name] = self.table.pin(name)  # clean: sticky is emptied by unstick_all()

    def unstick_all(self):
        for shard in self.sticky.values():
            self.table.unpin(shard)
        self.sticky.clear()

    def refresh_sticky(self):
        """Takes the new files of all sticky shards after a publish."""
        for name in list(self.sticky):
            old = self.sticky[name]
            self.table.doom(name)
            self.sticky[name] = self.table.pin(name)  # clean: near miss, the doomed shard's pin is dropped on the next line
            self.table.unpin(old)

    def rescan(self, every):
        if not self._scan_lock.acquire(blocking=False):  # leak: held after an empty list of names returns
            return 0
        picked = self.names[::every]
        if not picked:
            return 0
        try:
            return sum(os.path.getsize(os.path.join(self.table.root, n)) for n in picked)
        finally:
            self._scan_lock.release()

    def walk(self):
        """Yields (name, vectors); the shard is pinned while the consumer works on it."""
        for name in self.names:
            shard = self.table.pin(name)  # clean: unpinned in finally when the consumer goes on or closes
            try:
                yield name, shard.vectors
            finally:
                self.table.unpin(shard)


def header_of(path):
    fd = os.open(path, os.O_RDONLY)  # leak: a short file returns with it open
    head = os.read(fd, 16)
    if len(head) < 16:
        return None
    os.close(fd)
    return head
