"""Receive buffers and the result sets that sit in them."""
import threading

import numpy as np

HIT = np.dtype([("id", "<u8"), ("score", "<f4"), ("shard", "<u4")])


class BufferShelf:
    def __init__(self, count, size=1 << 16):
        self._shelf = [bytearray(size) for _ in range(count)]
        self._sem = threading.Semaphore(count)
        self._mutex = threading.Lock()

    def grab(self):
        self._sem.acquire()  # clean: released by stow()
        with self._mutex:
            return self._shelf.pop()  # clean: returned

    def stow(self, buf):
        with self._mutex:
            self._shelf.append(buf)
        self._sem.release()


class ResultSet:
    """Hits of one shard, as a view into a buffer that is stowed by close()."""

    def __init__(self, shelf, buf, nbytes):
        self.shelf = shelf
        self.buf = buf
        self.hits = np.frombuffer(buf, HIT, count=nbytes // HIT.itemsize)

    def __len__(self):
        return 0 if self.hits is None else len(self.hits)

    def close(self):
        if self.buf is not None:
            self.hits = None
            self.shelf.stow(self.buf)
            self.buf = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def merge(sets, k):
    """Copies the k best hits out of several sets, and closes the sets."""
    parts = [s.hits.copy() for s in sets]
    for s in sets:
        s.close()
    if not parts:
        return np.empty(0, HIT)
    hits = np.concatenate(parts)
    return hits[np.argsort(-hits["score"])[:k]]


class Recent:
    """Result sets of the last queries, for 'more like this'."""

    def __init__(self, size):
        self.size = size
        self.sets = {}

    def remember(self, qid, rs):
        old = self.sets.pop(qid, None)
        if old is not None:
            old.close()
        self.sets[qid] = rs
        while len(self.sets) > self.size:
            self.sets.pop(next(iter(self.sets))).close()

    def clear(self):
        while self.sets:
            self.sets.popitem()[1].close()
