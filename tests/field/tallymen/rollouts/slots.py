"""Trajectory slots in shared memory.

An actor begins a slot and seals or abandons it; the learner fetches sealed
slots and recycles them.
"""
import queue
import threading

import numpy as np


class Timeout(Exception):
    pass


class TrajectoryRing:
    def __init__(self, count, steps, width):
        self.obs = np.zeros((count, steps, width), np.float32)
        self.reward = np.zeros((count, steps), np.float32)
        self.length = np.zeros(count, np.int64)
        self.version = np.zeros(count, np.int64)
        self._free = queue.SimpleQueue()
        self._sealed = queue.Queue()
        for i in range(count):
            self._free.put(i)

    def begin(self, timeout=None):
        try:
            slot = self._free.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            raise Timeout("begin") from None
        self.length[slot] = 0
        return slot

    def seal(self, slot, version):
        self.version[slot] = version
        self._sealed.put(slot)

    def abandon(self, slot):
        self._free.put(slot)

    def fetch(self, timeout=None):
        """A sealed slot, None when there is none in time."""
        try:
            return self._sealed.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            return None

    def recycle(self, slot):
        self._free.put(slot)

    def flush(self, older_than):
        """Recycles sealed slots of old versions; keeps the order of the others."""
        for _ in range(self._sealed.qsize()):
            slot = self.fetch(timeout=0)  # leak: empty trajectories are neither kept nor recycled
            if slot is None:
                return
            if self.length[slot] == 0:
                continue
            if self.version[slot] < older_than:
                self.recycle(slot)
            else:
                self._sealed.put(slot)


class Version:
    def __init__(self, number, weights):
        self.number = number
        self.weights = weights
        self.pins = 0


class WeightVersions:
    """Weights stay in memory while they are pinned."""

    def __init__(self, weights):
        self._mu = threading.Lock()
        self._all = {0: Version(0, weights)}
        self.latest = 0

    def publish(self, weights):
        with self._mu:
            self.latest += 1
            self._all[self.latest] = Version(self.latest, weights)
            self._collect()

    def pin(self, number=None):
        with self._mu:
            v = self._all[self.latest if number is None else number]
            v.pins += 1
            return v

    def unpin(self, v):
        with self._mu:
            v.pins -= 1
            self._collect()

    def _collect(self):
        for n in [n for n, v in self._all.items() if v.pins == 0 and n != self.latest]:
            del self._all[n]
