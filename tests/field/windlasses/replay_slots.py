"""Replay buffer storage: ref-counted transition slots over flat tensors."""
import random
import threading

import torch


class SlotStore(object):
    """Slots are ints. claim() starts a slot with one reference; hold() adds
    one; drop() takes one away and puts the slot on the free list at zero."""

    def __init__(self, capacity, obs_dim):
        self.capacity = capacity
        self.obs = torch.zeros(capacity, obs_dim)
        self.act = torch.zeros(capacity, dtype=torch.long)
        self.rew = torch.zeros(capacity)
        self.refs = [0] * capacity
        self.free = list(range(capacity))
        self.mu = threading.RLock()

    def claim(self):
        with self.mu:
            if not self.free:
                return -1
            slot = self.free.pop()  # clean: returned to the caller with one reference
            self.refs[slot] = 1
            return slot

    def claim_zeroed(self):
        with self.mu:
            slot = self.claim()  # clean: returned, -1 means nothing was taken
            if slot >= 0:
                self.obs[slot].zero_()
            return slot

    def hold(self, slot):
        with self.mu:
            self.refs[slot] += 1
            return slot

    def drop(self, slot):
        with self.mu:
            self.refs[slot] -= 1
            if self.refs[slot] == 0:
                self.free.append(slot)

    def shrink(self, n):
        """Take n slots out of circulation for good, e.g. before a resize."""
        out = []
        with self.mu:
            while self.free and len(out) < n:
                out.append(self.free.pop())  # clean: near miss, the list of removed slots is what the caller asked for
        return out

    def defrag(self):
        """Move the free list into address order."""
        with self.mu:
            order = []
            while self.free:
                order.append(self.free.pop())  # clean: near miss, sorted and put back on the next line
            self.free = sorted(order, reverse=True)


class RingIndex(object):
    """FIFO over slots; evicts the oldest when it is longer than limit."""

    def __init__(self, store, limit):
        self.store = store
        self.limit = limit
        self.fifo = []
        self.prio = {}

    def add(self, obs, act, rew, prio=1.0):
        slot = self.store.claim()  # clean: the fifo owns it and evict() drops it
        if slot < 0:
            self.evict(1)
            slot = self.store.claim()  # clean: same fifo owns it
            if slot < 0:
                return False
        self.store.obs[slot].copy_(obs)
        self.store.act[slot] = act
        self.store.rew[slot] = rew
        self.fifo.append(slot)
        self.prio[slot] = prio
        if len(self.fifo) > self.limit:
            self.evict(len(self.fifo) - self.limit)
        return True

    def add_if_novel(self, obs, act, rew, threshold):
        slot = self.store.claim()  # leak: a non-novel observation returns with the slot still claimed
        if slot < 0:
            return False
        self.store.obs[slot].copy_(obs)
        if self.fifo:
            near = self.store.obs[self.fifo] - obs
            if near.norm(dim=1).min().item() < threshold:
                return False
        self.store.act[slot] = act
        self.store.rew[slot] = rew
        self.fifo.append(slot)
        self.prio[slot] = 1.0
        return True

    def evict(self, n):
        for _ in range(min(n, len(self.fifo))):
            slot = self.fifo.pop(0)
            self.prio.pop(slot, None)
            self.store.drop(slot)

    def sample(self, k):
        """Batch of slots pinned by an extra reference; unpin() gives them up."""
        picks = random.sample(self.fifo, min(k, len(self.fifo)))
        return [self.store.hold(s) for s in picks]  # clean: the pinned list goes to the caller

    def sample_weighted(self, k, floor):
        pinned = []
        for slot in self.fifo:
            self.store.hold(slot)  # leak: a slot below the floor is skipped without drop
            if self.prio[slot] < floor:
                continue
            pinned.append(slot)
            if len(pinned) == k:
                break
        return pinned

    def unpin(self, slots):
        for s in slots:
            self.store.drop(s)

    def clear(self):
        self.evict(len(self.fifo))


class NStepAssembler(object):
    """Keeps the last n slots of every env alive until the return is known."""

    def __init__(self, index, n, gamma):
        self.index = index
        self.store = index.store
        self.n = n
        self.gamma = gamma
        self.window = {}

    def push(self, env, slot):
        q = self.window.setdefault(env, [])
        q.append(self.store.hold(slot))  # leak: reset_env() replaces the window without dropping what it holds
        if len(q) > self.n:
            self.store.drop(q.pop(0))

    def reset_env(self, env):
        self.window[env] = []

    def flush(self, env):
        total = 0.0
        for i, slot in enumerate(self.window.pop(env, [])):
            total += (self.gamma ** i) * float(self.store.rew[slot])
            self.store.drop(slot)
        return total


class GoalRelabeler(object):
    def __init__(self, index):
        self.index = index
        self.store = index.store
        self.pending = {}

    def stage(self, key, obs):
        """Stage a hindsight transition; commit() or discard() settles it."""
        slot = self.store.claim_zeroed()  # leak: restaging the same key overwrites the slot held there
        if slot < 0:
            return False
        self.store.obs[slot].copy_(obs)
        self.pending[key] = slot
        return True

    def commit(self, key, rew):
        slot = self.pending.pop(key, None)
        if slot is None:
            return
        self.store.rew[slot] = rew
        self.index.fifo.append(slot)
        self.index.prio[slot] = 1.0

    def discard(self, key):
        slot = self.pending.pop(key, None)
        if slot is not None:
            self.store.drop(slot)


def train_batch(index, k, update):
    slots = index.sample(k)  # clean: unpinned in finally
    try:
        obs = index.store.obs[slots]
        return update(obs, index.store.act[slots], index.store.rew[slots])
    finally:
        index.unpin(slots)


def td_targets(index, k, net, clip):
    slots = index.sample(k)  # leak: the short-batch return leaves the slots pinned
    if len(slots) < k:
        return None
    with torch.no_grad():
        q = net(index.store.obs[slots]).max(dim=1).values
    index.unpin(slots)
    return q.clamp(-clip, clip)


def iter_minibatches(index, k, rounds):
    for _ in range(rounds):
        slots = index.sample(k)  # clean: finally runs at the next step or when the generator closes
        try:
            yield index.store.obs[slots]
        finally:
            index.unpin(slots)


def duplicate(store, slot):
    """Clone one transition into a slot of its own."""
    with store.mu:
        store.hold(slot)  # leak: the source keeps the extra reference when no slot is free
        dst = store.claim()  # clean: returned to the caller
        if dst < 0:
            return -1
        store.obs[dst].copy_(store.obs[slot])
        store.act[dst] = store.act[slot]
        store.rew[dst] = store.rew[slot]
        store.drop(slot)
        return dst
