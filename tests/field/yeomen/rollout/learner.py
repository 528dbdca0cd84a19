import logging
import threading

import numpy as np

log = logging.getLogger(__name__)


class WeightVersions:
    """Weights by version; one that nobody pins is deleted when a newer one is there."""

    def __init__(self):
        self._pins = {}
        self._weights = {}
        self.latest = 0
        self._lock = threading.Lock()

    def add(self, weights):
        with self._lock:
            self.latest += 1
            self._weights[self.latest] = weights
            self._pins[self.latest] = 0
            self._collect()

    def pin(self, version=None):
        with self._lock:
            version = version or self.latest
            self._pins[version] += 1
            return version

    def unpin(self, version):
        with self._lock:
            self._pins[version] -= 1
            self._collect()

    def _collect(self):
        for version in [v for v, n in self._pins.items() if n == 0 and v != self.latest]:
            del self._pins[version], self._weights[version]


class Learner:
    def __init__(self, ring, versions, optimise, group_size=8):
        self.ring = ring
        self.versions = versions
        self.optimise = optimise
        self.group_size = group_size
        self.groups = {}
        self.skipped = 0
        self._lock = threading.Lock()
        self.acting = versions.pin()  # clean: sync() unpins what it replaces and close() the last
        self.reference = versions.pin()  # clean: unpinned by close()

    def ingest(self, block):
        with self._lock:
            group = self.groups.setdefault(block.task_id, [])
            group.append(block)
            if len(group) < self.group_size:
                return
            del self.groups[block.task_id]
        self._learn(group)

    def _learn(self, group):
        rewards = np.array([b.reward for b in group])
        if rewards.std() < 1e-6:
            self.skipped += 1
            log.debug("no variance, %d groups skipped", self.skipped)
            return
        advantage = (rewards - rewards.mean()) / rewards.std()
        try:
            self.versions.add(self.optimise(group, advantage))
        finally:
            for block in group:
                self.ring.give(block)

    def sync(self):
        """Moves on to the latest weights; True when they are new."""
        newest = self.versions.pin()  # leak: the return for unchanged weights keeps the second pin
        if newest == self.acting:
            return False
        old, self.acting = self.acting, newest
        self.versions.unpin(old)
        return True

    def close(self):
        for group in self.groups.values():
            for block in group:
                self.ring.give(block)
        self.groups.clear()
        self.versions.unpin(self.acting)
        self.versions.unpin(self.reference)
