"""Swapping of paused rollouts between GPU blocks and a pinned host arena."""
import threading
from collections import deque

import numpy as np
import torch


class GpuBlocks:
    def __init__(self, n):
        self._q = deque(range(n))

    def take(self, n):
        if len(self._q) < n:
            return None
        return [self._q.popleft() for _ in range(n)]  # clean: returned to the caller

    def give(self, ids):
        self._q.extend(ids)


class HostArena:
    """Host blocks in a boolean map."""

    def __init__(self, n):
        self._busy = np.zeros(n, dtype=bool)

    def reserve(self, n):
        idle = np.flatnonzero(~self._busy)
        if idle.size < n:
            return None
        ids = idle[:n]
        self._busy[ids] = True
        return ids

    def unreserve(self, ids):
        self._busy[ids] = False


class EventShelf:
    """CUDA events are slow to create, so they are kept."""

    def __init__(self):
        self._events = []

    def fetch(self):
        return self._events.pop() if self._events else torch.cuda.Event()  # clean: returned to the caller

    def stow(self, ev):
        self._events.append(ev)


class Paused:
    __slots__ = ("sid", "gpu", "host", "event")

    def __init__(self, sid, gpu):
        self.sid = sid
        self.gpu = gpu
        self.host = None
        self.event = None


class Swapper:
    def __init__(self, gpu: GpuBlocks, host: HostArena, events: EventShelf, copier):
        self.gpu = gpu
        self.host = host
        self.events = events
        self.copier = copier
        self._copying = []
        self._mu = threading.Lock()

    def swap_out(self, seq):
        ids = self.host.reserve(len(seq.gpu))  # clean: in seq.host, which swap_in() and forget() unreserve
        if ids is None:
            return False
        ev = self.events.fetch()  # clean: near miss, in seq.event, which poll() stows
        self.copier.d2h(seq.gpu, ids, ev)
        seq.host, seq.event = ids, ev
        self._copying.append(seq)
        return True

    def poll(self):
        """GPU blocks go back once their copy is done."""
        still = []
        for seq in self._copying:
            if not seq.event.query():
                still.append(seq)
                continue
            self.events.stow(seq.event)
            seq.event = None
            self.gpu.give(seq.gpu)
            seq.gpu = None
        self._copying = still

    def swap_in(self, seq):
        if seq.event is not None:
            return False
        blocks = self.gpu.take(len(seq.host))  # leak: not given back when the copy is refused
        if blocks is None:
            return False
        if not self.copier.h2d(seq.host, blocks):
            return False
        self.host.unreserve(seq.host)
        seq.gpu, seq.host = blocks, None
        return True

    def forget(self, seq):
        """The sequence was cancelled, wherever its blocks are."""
        if seq in self._copying:
            seq.event.synchronize()
            self.poll()
        if seq.gpu is not None:
            self.gpu.give(seq.gpu)
            seq.gpu = None
        if seq.host is not None:
            self.host.unreserve(seq.host)
            seq.host = None

    def exchange(self, out_seq, in_seq):
        """Swap one sequence out and another in by one pass of the copy engine."""
        if out_seq.event is not None or in_seq.event is not None:
            return False
        host_ids = self.host.reserve(len(out_seq.gpu))  # leak: not unreserved when there are too few GPU blocks
        if host_ids is None:
            return False
        blocks = self.gpu.take(len(in_seq.host))  # clean: in in_seq.gpu
        if blocks is None:
            return False
        self.copier.both(out_seq.gpu, host_ids, in_seq.host, blocks)
        self.gpu.give(out_seq.gpu)
        self.host.unreserve(in_seq.host)
        out_seq.gpu, out_seq.host = None, host_ids
        in_seq.gpu, in_seq.host = blocks, None
        return True

    def try_trim(self, seq, keep):
        if not self._mu.acquire(blocking=False):  # clean: near miss, nothing is held on the first return and finally releases
            return 0
        try:
            surplus = seq.gpu[keep:]
            if not surplus:
                return 0
            del seq.gpu[keep:]
            self.gpu.give(surplus)
            return len(surplus)
        finally:
            self._mu.release()

    def merge_tail(self, seq, other):
        self._mu.acquire()  # leak: two sequences that are not both on the GPU return under the lock
        if seq.gpu is None or other.gpu is None:
            return False
        seq.gpu += other.gpu
        other.gpu = []
        self._mu.release()
        return True


class OffloadStore:
    """Finished prefixes that wait on the host for a next turn."""

    def __init__(self, host: HostArena, events: EventShelf, copier):
        self.host = host
        self.events = events
        self.copier = copier
        self.parked = {}
        self._pending = []

    def park(self, sid, gpu_ids):
        ids = self.host.reserve(len(gpu_ids))  # leak: parking a sequence again overwrites the ids of the turn before
        if ids is None:
            return False
        ev = self.events.fetch()  # leak: prune() filters finished entries out and their events with them
        self.copier.d2h(gpu_ids, ids, ev)
        self._pending.append((sid, ev))
        self.parked[sid] = ids
        return True

    def prune(self):
        self._pending = [(sid, ev) for sid, ev in self._pending if not ev.query()]
        return len(self._pending)

    def unpark(self, sid, gpu_ids):
        ids = self.parked.pop(sid, None)
        if ids is None:
            return False
        try:
            self.copier.h2d(ids, gpu_ids)
        finally:
            self.host.unreserve(ids)
        return True


class TurnStore:
    """Like OffloadStore, for conversations whose turns replace each other."""

    def __init__(self, host: HostArena, events: EventShelf, copier):
        self.host = host
        self.events = events
        self.copier = copier
        self.turns = {}

    def keep(self, conv, gpu_ids):
        ids = self.host.reserve(len(gpu_ids))  # clean: near miss, the ids it replaces are unreserved and drop() takes the last
        if ids is None:
            return False
        self._copy(gpu_ids, ids)
        before = self.turns.pop(conv, None)
        if before is not None:
            self.host.unreserve(before)
        self.turns[conv] = ids
        return True

    def _copy(self, gpu_ids, ids):
        ev = self.events.fetch()  # clean: stowed in finally
        try:
            self.copier.d2h(gpu_ids, ids, ev)
            ev.synchronize()
        finally:
            self.events.stow(ev)

    def prefetch(self, convs, gpu: GpuBlocks):
        """Yield (conv, blocks) for the conversations that fit; the blocks are the consumer's."""
        for conv in convs:
            ids = self.turns.get(conv)
            if ids is None:
                continue
            blocks = gpu.take(len(ids))  # clean: near miss, given back when the copy fails and else yielded
            if blocks is None:
                return
            if not self.copier.h2d(ids, blocks):
                gpu.give(blocks)
                continue
            yield conv, blocks

    def drop(self, conv):
        ids = self.turns.pop(conv, None)
        if ids is not None:
            self.host.unreserve(ids)

    def clear(self):
        for conv in list(self.turns):
            self.drop(conv)


def resume(store: TurnStore, gpu: GpuBlocks, convs, start):
    started = []
    for conv, blocks in store.prefetch(convs, gpu):  # clean: given back when start() refuses, else the engine's
        if start(conv, blocks):
            started.append(conv)
        else:
            gpu.give(blocks)
    return started
