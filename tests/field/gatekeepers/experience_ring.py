"""Experience store for asynchronous PPO: rollouts write, the learner reads."""
from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

log = logging.getLogger("xp")


class TrajectoryTooLong(ValueError):
    pass


@dataclass
class Trajectory:
    prompt_id: str
    tokens: np.ndarray
    logprobs: np.ndarray
    reward: float
    version: int


@dataclass(eq=False)
class Slot:
    index: int
    capacity: int
    refs: int = 0
    version: int = -1
    reward: float = 0.0
    prompt_id: str = ""
    length: int = 0
    cooling_until: float = 0.0
    data: Optional[np.ndarray] = field(default=None, repr=False)

    def fill(self, traj: Trajectory) -> None:
        n = len(traj.tokens)
        if n > self.capacity:
            raise TrajectoryTooLong(f"{traj.prompt_id}: {n} > {self.capacity}")
        if self.data is None:
            self.data = np.zeros((2, self.capacity), dtype=np.float32)
        self.data[0, :n] = traj.tokens
        self.data[1, :n] = traj.logprobs
        self.length, self.reward = n, traj.reward
        self.version, self.prompt_id = traj.version, traj.prompt_id


class ExperienceRing:
    def __init__(self, slots: int, capacity: int):
        self._lock = threading.RLock()
        self._free = [Slot(i, capacity) for i in range(slots)]
        self._committed: OrderedDict[int, Slot] = OrderedDict()

    def claim(self) -> Optional[Slot]:
        with self._lock:
            if not self._free and not self._evict_one():
                return None
            slot = self._free.pop()  # clean: returned to the caller with one reference
            slot.refs = 1
            return slot

    def claim_cool(self) -> Optional[Slot]:
        """Skips slots whose last DMA may still be in flight."""
        now = time.monotonic()
        with self._lock:
            while self._free:
                slot = self._free.pop()  # leak: a slot that still cools is popped, skipped and not put back
                if slot.cooling_until > now:
                    continue
                slot.refs = 1
                return slot
        return None

    def retain(self, slot: Slot) -> Slot:
        with self._lock:
            slot.refs += 1  # clean: the reference belongs to the caller
        return slot

    def release(self, slot: Slot) -> None:
        with self._lock:
            slot.refs -= 1
            if slot.refs == 0:
                self._free.append(slot)

    def commit(self, slot: Slot) -> None:
        """The writer's reference now belongs to the ring."""
        with self._lock:
            self._committed[slot.index] = slot

    def replace(self, old: Slot, new: Slot) -> None:
        with self._lock:
            present = self._committed.pop(old.index, None)
            self._committed[new.index] = new
        if present is not None:
            self.release(present)

    def _evict_one(self) -> bool:
        for index, slot in self._committed.items():
            if slot.refs == 1:
                del self._committed[index]
                self.release(slot)
                return True
        return False

    def snapshot(self) -> list[Slot]:
        with self._lock:
            return list(self._committed.values())

    def close(self) -> None:
        with self._lock:
            while self._committed:
                self.release(self._committed.popitem()[1])


class Writer:
    def __init__(self, ring: ExperienceRing):
        self.ring = ring
        self.dropped = 0

    def write(self, traj: Trajectory) -> bool:
        slot = self.ring.claim()  # clean: released before the re-raise, otherwise the ring owns it
        if slot is None:
            self.dropped += 1
            return False
        try:
            slot.fill(traj)
        except TrajectoryTooLong:
            self.ring.release(slot)
            raise
        self.ring.commit(slot)
        return True

    def write_group(self, group: list[Trajectory]) -> int:
        written = 0
        for traj in group:
            slot = self.ring.claim_cool()  # leak: fill() may raise TrajectoryTooLong with the slot in hand
            if slot is None:
                break
            slot.fill(traj)
            self.ring.commit(slot)
            written += 1
        return written


class Batch:
    def __init__(self, ring: ExperienceRing, slots: list[Slot]):
        self.ring = ring
        self.slots = slots

    def tensors(self):
        width = self.slots[0].capacity
        return np.stack([s.data[:, :width] for s in self.slots]), np.array([s.reward for s in self.slots])

    def close(self) -> None:
        slots, self.slots = self.slots, []
        for s in slots:
            self.ring.release(s)


class UniformSampler:
    def __init__(self, ring: ExperienceRing, size: int):
        self.ring, self.size = ring, size

    def sample(self) -> Optional[Batch]:
        pool = self.ring.snapshot()
        if len(pool) < self.size:
            return None
        picked = random.sample(pool, self.size)
        return Batch(self.ring, [self.ring.retain(s) for s in picked])  # clean: the references move into the batch


class FreshSampler(UniformSampler):
    def __init__(self, ring, size, max_lag: int):
        super().__init__(ring, size)
        self.max_lag = max_lag
        self.version = 0

    def sample(self) -> Optional[Batch]:
        keep = []
        for slot in self.ring.snapshot():
            held = self.ring.retain(slot)  # leak: stale slots are skipped after they were retained, and a short batch is dropped
            if self.version - held.version > self.max_lag:
                continue
            keep.append(held)
            if len(keep) == self.size:
                return Batch(self.ring, keep)
        return None


class PairBuilder:
    """Waits for a second answer to the same prompt (DPO from on-policy data)."""

    def __init__(self, ring: ExperienceRing):
        self.ring = ring
        self._waiting: dict[str, Slot] = {}

    def offer(self, slot: Slot) -> Optional[Batch]:
        mine = self.ring.retain(slot)  # clean: near miss, it waits in the table or leaves in a batch; flush() releases the rest
        mate = self._waiting.pop(slot.prompt_id, None)
        if mate is None:
            self._waiting[slot.prompt_id] = mine
            return None
        return Batch(self.ring, sorted((mate, mine), key=lambda s: -s.reward))

    def flush(self) -> None:
        while self._waiting:
            self.ring.release(self._waiting.popitem()[1])


class Prefetcher:
    def __init__(self, sampler: UniformSampler):
        self.sampler = sampler
        self._next = sampler.sample()  # clean: get() hands it out, resample() and close() close it

    def get(self) -> Optional[Batch]:
        batch, self._next = self._next, self.sampler.sample()  # clean: near miss, the old one is returned and the new one waits in _next until get() or close()
        return batch

    def resample(self) -> None:
        old, self._next = self._next, self.sampler.sample()  # clean: the batch that waited is closed
        if old is not None:
            old.close()

    def close(self) -> None:
        if self._next is not None:
            self._next.close()


class Learner:
    def __init__(self, ring: ExperienceRing, sampler: UniformSampler, policy, max_kl=0.2):
        self.ring, self.sampler, self.policy, self.max_kl, self.skipped = ring, sampler, policy, max_kl, 0

    def epoch(self, steps: int) -> None:
        for _ in range(steps):
            batch = self.sampler.sample()  # leak: a batch over the KL limit is skipped without close()
            if batch is None:
                time.sleep(0.05)
                continue
            kl = self.policy.kl(*batch.tensors())
            if kl > self.max_kl:
                self.skipped += 1
                continue
            self.policy.update(*batch.tensors())
            batch.close()

    def relabel(self, slot: Slot, reward: float) -> bool:
        copy = self.ring.claim()  # clean: near miss, replace() puts it in the ring's table
        if copy is None:
            return False
        copy.data = None if slot.data is None else slot.data.copy()
        copy.length, copy.version, copy.prompt_id = slot.length, slot.version, slot.prompt_id
        copy.reward = reward
        self.ring.replace(slot, copy)
        return True
