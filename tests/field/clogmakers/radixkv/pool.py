"""Token level memory: one index for the keys and values of every token."""
import numpy as np


class TokenPool:
    def __init__(self, size, page=1):
        self.size = size
        self.page = page
        self._free = np.arange(size, dtype=np.int64)
        self._group = None

    def available(self):
        return len(self._free)

    def alloc(self, n):
        if n > len(self._free):
            return None
        out, self._free = np.split(self._free, [n])  # clean: handed to the caller
        return out

    def free(self, idx):
        if len(idx) == 0:
            return
        if self._group is not None:
            self._group.append(idx)
        else:
            self._free = np.concatenate([self._free, idx])

    # frees of one step are put together

    def free_group_begin(self):
        self._group = []

    def free_group_end(self):
        group, self._group = self._group, None
        if group:
            self.free(np.concatenate(group))


class ReqSlots:
    """A row of the request-to-token table for every running request."""

    def __init__(self, rows, max_len):
        self.table = np.zeros((rows, max_len), dtype=np.int64)
        self._free = list(range(rows))

    def alloc(self):
        return self._free.pop() if self._free else None  # clean: handed to the caller

    def free(self, row):
        self._free.append(row)
