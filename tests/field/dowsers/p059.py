"""Borrowed host arrays come as a pair: the array and the function giving it back."""
import functools

import numpy as np


class HostArrays:
    def __init__(self):
        self._shelf = {}
        self.lent = 0

    def _shelve(self, arr):
        self._shelf.setdefault(arr.shape, []).append(arr)
        self.lent -= 1

    def loan(self, shape):
        stock = self._shelf.get(shape)
        arr = stock.pop() if stock else np.empty(shape, np.float32)
        self.lent += 1
        return arr, functools.partial(self._shelve, arr)


class LogitSink:
    def __init__(self, arrays: HostArrays, writer):
        self.arrays = arrays
        self.writer = writer

    def dump(self, logits):
        arr, give_back = self.arrays.loan(logits.shape)  # clean: given back in finally
        try:
            logits.copy_to(arr)
            self.writer.append(arr)
        finally:
            give_back()

    def dump_top(self, logits, k):
        arr, give_back = self.arrays.loan(logits.shape)  # leak: k == 0 returns without giving back
        logits.copy_to(arr)
        if k == 0:
            return []
        top = np.argsort(arr)[-k:].tolist()
        give_back()
        return top

    def entropy(self, logits):
        arr, give_back = self.arrays.loan(logits.shape)  # clean: given back before the return
        logits.copy_to(arr)
        h = float(-(np.exp(arr) * arr).sum())
        give_back()
        return h

    def compare(self, a, b):
        arr, _ = self.arrays.loan(a.shape)  # leak: the function giving it back is thrown away
        a.copy_to(arr)
        return b.distance(arr)

    def open(self, shape):
        self.arr, self.done = self.arrays.loan(shape)  # clean: close() gives it back

    def close(self):
        self.done()
