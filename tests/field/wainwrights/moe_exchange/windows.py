"""Receive windows in symmetric memory, and credits that say how many of a peer's windows we may write to.

All ranks create the same windows in the same order, so a window index means the same everywhere.
"""
import collections
import contextlib
import threading

import torch


class WindowShortage(RuntimeError):
    pass


class CreditTimeout(RuntimeError):
    pass


class Window:
    def __init__(self, index, tensor):
        self.index, self.tensor = index, tensor
        self.rows, self.tag = 0, None

    def put(self, x):
        self.tensor[: len(x)].copy_(x)
        self.rows = len(x)
        return self

    def get(self):
        return self.tensor[: self.rows]


class WindowPool:
    def __init__(self, n, rows, width, device, dtype=torch.bfloat16):
        self.rows = rows
        self._all = [Window(i, torch.empty(rows, width, dtype=dtype, device=device)) for i in range(n)]
        self._free = list(range(n))
        self._tagged = collections.defaultdict(list)
        self._lock = threading.Lock()

    def open(self, tag=None):
        with self._lock:
            if not self._free:
                raise WindowShortage("all %d windows are open" % len(self._all))
            w = self._all[self._free.pop(0)]  # clean: returned to the caller
            w.tag = tag
            if tag is not None:
                self._tagged[tag].append(w)
        return w

    def open_for(self, rows, tag=None):
        got = []
        while rows > 0:
            try:
                w = self.open(tag)  # clean: near miss, the handler closes those of the incomplete set
            except WindowShortage:
                for g in got:
                    self.close(g)
                return []
            got.append(w)
            rows -= self.rows
        return got

    def open_even(self, parity):
        """Peers with an odd number use the odd windows, so that both directions never wait for one another."""
        with self._lock:
            for _ in range(len(self._free)):
                i = self._free.pop(0)  # leak: an index of the other parity is popped and not put back at the end
                if i % 2 == parity:
                    self._all[i].tag = None
                    return self._all[i]
        return None

    def close(self, w):
        with self._lock:
            if w.tag is not None:
                self._tagged[w.tag].remove(w)
                w.tag = None
            w.rows = 0
            self._free.append(w.index)

    def close_tag(self, tag):
        for w in list(self._tagged[tag]):
            self.close(w)


class Credits:
    def __init__(self, peers, each):
        self._have = {p: each for p in peers}
        self._cv = threading.Condition()

    def spend(self, peer, timeout=10.0):
        with self._cv:
            if not self._cv.wait_for(lambda: self._have[peer] > 0, timeout):
                raise CreditTimeout("no credit for rank %d" % peer)
            self._have[peer] -= 1
        return peer

    def try_spend(self, peer):
        with self._cv:
            if self._have[peer] == 0:
                return False
            self._have[peer] -= 1
            return True

    def refund(self, peer):
        with self._cv:
            self._have[peer] += 1
            self._cv.notify_all()

    @contextlib.contextmanager
    def spent(self, peer):
        self.spend(peer)  # clean: finally
        try:
            yield
        finally:
            self.refund(peer)
