"""Trajectory rows and weight versions."""
import asyncio
import logging

import numpy as np

log = logging.getLogger("rollout.store")


class Arena:
    """Rows of one big array. open_row() by actors, commit() or discard() by them too, free() by the learner."""

    def __init__(self, rows, length, width):
        self.data = np.zeros((rows, length, width), dtype=np.float32)
        self.used = np.zeros(rows, dtype=np.int64)
        self._free = list(range(rows))
        self.committed = asyncio.Queue()

    def open_row(self):
        """Row number, or None when the learner is behind."""
        if not self._free:
            return None
        row = self._free.pop()  # clean: returned to the caller
        self.used[row] = 0
        return row

    def write(self, row, obs):
        self.data[row, self.used[row]] = obs
        self.used[row] += 1
        return self.used[row] < self.data.shape[1]

    def commit(self, row):
        self.committed.put_nowait(row)

    def discard(self, row):
        self._free.append(row)

    free = discard

    def requeue(self, rows):
        for row in rows:
            self.committed.put_nowait(row)


class Weights:
    """Versions of the policy. A version is dropped when nobody holds it and a newer one is there."""

    def __init__(self, initial):
        self.current = 0
        self._params = {0: initial}
        self._holds = {0: 0}

    def publish(self, params):
        old = self.current
        self.current += 1
        self._params[self.current] = params
        self._holds[self.current] = 0
        self._sweep(old)
        return self.current

    def hold(self):
        """Pin the current version and return its number."""
        self._holds[self.current] += 1
        return self.current

    def let_go(self, version):
        self._holds[version] -= 1
        self._sweep(version)

    def params(self, version):
        return self._params[version]

    def _sweep(self, version):
        if version != self.current and self._holds.get(version) == 0:
            del self._holds[version]
            del self._params[version]
            log.debug("version %d dropped", version)
