"""Private pool handles for captured graphs."""
import threading

import torch


class PoolHandle:
    def __init__(self, ident):
        self.ident = ident
        self.users = 0


class MemPoolRegistry:
    def __init__(self, capacity):
        self._capacity = capacity
        self._lock = threading.Lock()
        self._vacant = []
        self._created = 0

    def open_pool(self):
        with self._lock:
            if self._vacant:
                handle = self._vacant.pop()  # clean: returned with one user
                handle.users = 1
                return handle
            if self._created == self._capacity:
                return None
            self._created += 1
        handle = PoolHandle(torch.cuda.graph_pool_handle())
        handle.users = 1
        return handle

    def share(self, handle):
        with self._lock:
            handle.users += 1
        return handle

    def close_pool(self, handle):
        with self._lock:
            handle.users -= 1
            if handle.users == 0:
                self._vacant.append(handle)


class StaticInputs:
    """Preallocated graph inputs per batch size, lent one set at a time."""

    def __init__(self, shapes, per_shape=2):
        self._sets = {s: [torch.zeros(s, device="cuda") for _ in range(per_shape)] for s in shapes}

    def lend(self, shape):
        stack = self._sets.get(shape)
        if not stack:
            return None
        return stack.pop()  # clean: lent to the caller

    def lend_padded(self, batch, width):
        for shape in sorted(self._sets):
            if shape[0] < batch:
                continue
            t = self.lend(shape)  # leak: a set of the wrong width is passed over without being returned
            if t is not None and t.shape[1] == width:
                return t
        return None

    def restore(self, t):
        self._sets[tuple(t.shape)].append(t)
