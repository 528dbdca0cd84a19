import logging
from collections import deque

import numpy as np

log = logging.getLogger(__name__)


class Learner:
    def __init__(self, ring, versions, optimizer, batch=16, max_lag=4, replay=64):
        self.ring = ring
        self.versions = versions
        self.optimizer = optimizer
        self.batch = batch
        self.max_lag = max_lag
        self.replay = deque(maxlen=replay)
        self.pending = []
        self.steps = 0

    def _gather(self, timeout):
        """Slots for one batch or None."""
        slots = []
        while len(slots) < self.batch:
            slot = self.ring.fetch(timeout)  # leak: the batch gathered so far is dropped with the None that is returned
            if slot is None:
                log.info("starved at %d of %d", len(slots), self.batch)
                return None
            if self.versions.latest - self.ring.version[slot] > self.max_lag:
                self.ring.recycle(slot)
                continue
            slots.append(slot)
        return slots

    def train_once(self, timeout=5.0):
        slots = self._gather(timeout)  # clean: None has nothing to recycle, else the finally does
        if slots is None:
            return False
        try:
            loss = self._loss(slots)
            if not np.isfinite(loss):
                log.error("loss is %s, batch skipped", loss)
                return False
            self.versions.publish(self.optimizer.step(loss))
            self.steps += 1
            return True
        finally:
            for s in slots:
                self.ring.recycle(s)

    def _loss(self, slots):
        return float(sum(self.ring.reward[s, : self.ring.length[s]].sum() for s in slots))

    def remember(self, count):
        """Keeps trajectories for replay."""
        for _ in range(count):
            slot = self.ring.fetch(timeout=0.1)  # leak: a full deque with maxlen throws its oldest slot away silently
            if slot is None:
                return
            self.replay.append(slot)

    def replay_once(self):
        if not self.replay:
            return None
        slot = self.replay[np.random.randint(len(self.replay))]
        return self._loss([slot])

    def hold(self, limit):
        """Trajectories that wait for a reward model; see release_held()."""
        while len(self.pending) < limit:
            slot = self.ring.fetch(timeout=0)  # clean: near miss, in the pending list until release_held()
            if slot is None:
                break
            self.pending.append(slot)
        return len(self.pending)

    def release_held(self, scores):
        while self.pending:
            slot = self.pending.pop()
            self.ring.reward[slot] += scores.get(slot, 0.0)
            self.ring.recycle(slot)

    def close(self):
        self.release_held({})
        while self.replay:
            self.ring.recycle(self.replay.pop())
