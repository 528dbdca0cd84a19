"""Module-level pool of activations, cached by (rows, width), rows rounded up to powers of two.

    x = buffers.loan(rows, width)
    ...
    buffers.repay(x)
"""
import threading

import torch

_cache = {}
_loaned = {}
_lock = threading.Lock()
limit = 256


def _bucket(rows):
    b = 1
    while b < rows:
        b *= 2
    return b


def loan(rows, width):
    """A (rows, width) view, or None if too many are on loan."""
    key = (_bucket(rows), width)
    with _lock:
        if len(_loaned) >= limit:
            return None
        stack = _cache.setdefault(key, [])
        base = stack.pop() if stack else torch.empty(key)  # clean: kept in _loaned until repay
        _loaned[base.data_ptr()] = (key, base)
    return base[:rows]


def repay(view):
    with _lock:
        key, base = _loaned.pop(view.data_ptr())
        _cache[key].append(base)


def loan_like(x):
    return loan(x.shape[0], x.shape[1])  # clean: handed to the caller


class Loans:
    """Collects loans of one forward pass and repays them together."""

    def __init__(self):
        self._views = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        while self._views:
            repay(self._views.pop())

    def get(self, rows, width):
        x = loan(rows, width)  # clean: near miss, self._views holds it and __exit__ repays
        if x is not None:
            self._views.append(x)
        return x

    def keep(self, x):
        """Takes x out of the set, so that it outlives the pass."""
        self._views = [v for v in self._views if v is not x]
        return x
