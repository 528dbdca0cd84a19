"""Prioritised replay with pinned segments; a pinned segment may not be overwritten."""
import random
import threading
from typing import Iterator, List, NamedTuple, Optional

import torch


class SegmentRef(NamedTuple):
    seg: int
    version: int


class SegmentStore:
    def __init__(self, n_segments, seg_len, obs_dim):
        self.obs = torch.zeros(n_segments, seg_len, obs_dim)
        self.rew = torch.zeros(n_segments, seg_len)
        self.pins = [0] * n_segments
        self.versions = [0] * n_segments
        self.write_lock = threading.Lock()
        self.cursor = 0

    def pin(self, seg) -> SegmentRef:
        self.pins[seg] += 1
        return SegmentRef(seg, self.versions[seg])

    def pin_random(self) -> Optional[SegmentRef]:
        live = [i for i, v in enumerate(self.versions) if v > 0 and self.pins[i] == 0]
        if not live:
            return None
        return self.pin(random.choice(live))  # clean: passed on to the caller

    def unpin(self, ref: SegmentRef):
        self.pins[ref.seg] -= 1

    def write(self, obs, rew) -> bool:
        if not self.write_lock.acquire(blocking=False):  # leak: a full store returns False with the lock held
            return False
        for _ in range(len(self.pins)):
            i = self.cursor
            self.cursor = (self.cursor + 1) % len(self.pins)
            if self.pins[i] == 0:
                self.obs[i].copy_(obs)
                self.rew[i].copy_(rew)
                self.versions[i] += 1
                self.write_lock.release()
                return True
        return False

    def write_wait(self, obs, rew, seg) -> bool:
        self.write_lock.acquire()  # clean: near miss, the pinned case releases before it returns
        if self.pins[seg] > 0:
            self.write_lock.release()
            return False
        self.obs[seg].copy_(obs)
        self.rew[seg].copy_(rew)
        self.versions[seg] += 1
        self.write_lock.release()
        return True


class Learner:
    def __init__(self, store: SegmentStore, gamma=0.99):
        self.store = store
        self.gamma = gamma
        self.held: List[SegmentRef] = []
        self.target_ref: Optional[SegmentRef] = None

    def returns(self, ref):
        r = self.store.rew[ref.seg]
        out = torch.zeros_like(r)
        acc = 0.0
        for t in reversed(range(r.shape[0])):
            acc = float(r[t]) + self.gamma * acc
            out[t] = acc
        return out

    def sample(self, n):
        refs = []
        while len(refs) < n:
            ref = self.store.pin_random()  # clean: handed over in the list
            if ref is None:
                break
            refs.append(ref)
        return refs

    def train_batch(self, n):
        refs = self.sample(n)  # leak: fewer than n segments means a return with those few pinned
        if len(refs) < n:
            return None
        loss = sum(float(self.returns(r).mean()) for r in refs)
        for r in refs:
            self.store.unpin(r)
        return loss / n

    def train_any(self, n):
        refs = self.sample(n)  # clean: near miss, returning early only when the list is empty
        if not refs:
            return None
        loss = sum(float(self.returns(r).mean()) for r in refs)
        for r in refs:
            self.store.unpin(r)
        return loss / len(refs)

    def train_fresh(self, n, min_version):
        refs = self.sample(n)  # leak: stale references are filtered out of the list and never unpinned
        refs = [r for r in refs if r.version >= min_version]
        loss = sum(float(self.returns(r).mean()) for r in refs)
        for r in refs:
            self.store.unpin(r)
        return loss

    def train_fresh_split(self, n, min_version):
        refs = self.sample(n)  # clean: near miss, fresh and stale together are unpinned
        fresh = [r for r in refs if r.version >= min_version]
        stale = [r for r in refs if r.version < min_version]
        loss = sum(float(self.returns(r).mean()) for r in fresh)
        for r in fresh + stale:
            self.store.unpin(r)
        return loss

    def hold(self, seg):
        self.held.append(self.store.pin(seg))  # clean: let_go unpins the held ones

    def let_go(self):
        while self.held:
            self.store.unpin(self.held.pop())

    def set_target(self, seg):
        ref = self.store.pin(seg)  # clean: near miss, the old target is unpinned in the swap; clear_target ends it
        prev, self.target_ref = self.target_ref, ref
        if prev is not None:
            self.store.unpin(prev)

    def clear_target(self):
        if self.target_ref is None:
            return
        self.store.unpin(self.target_ref)
        self.target_ref = None

    def segments(self) -> Iterator[torch.Tensor]:
        for seg in range(len(self.store.pins)):
            ref = self.store.pin(seg)  # leak: a version of 0 continues with the segment pinned
            if ref.version == 0:
                continue
            yield self.returns(ref)
            self.store.unpin(ref)

    def td_error(self, seg_a, seg_b):
        a = self.store.pin(seg_a)  # clean: unpinned before the comparison result leaves
        b = self.store.pin(seg_b)  # leak: b is unpinned only where the versions agree
        delta = self.returns(a) - self.returns(b)
        self.store.unpin(a)
        if a.version == b.version:
            self.store.unpin(b)
        return delta

    def age(self, seg):
        ref = self.store.pin(seg)  # leak: never unpinned
        return self.store.versions[seg] - ref.version
