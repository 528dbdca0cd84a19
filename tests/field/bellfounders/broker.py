"""In-process message broker between the tokenizer workers and the model ranks.

Every delivery takes a slot of the consumer's prefetch quota and a ref on the payload
segment. Slots are counters, segments are reference counted.
"""
from __future__ import annotations

import collections
import heapq
import threading
import time
from dataclasses import dataclass, field


@dataclass
class Segment:
    seg_id: int
    data: bytes
    refs: int = 1


class SegmentStore:
    def __init__(self, max_segments=4096):
        self._by_id = {}
        self._next = 0
        self._max = max_segments
        self._mu = threading.Lock()

    def store(self, data):
        """Creates a segment with one reference, owned by the caller."""
        with self._mu:
            if len(self._by_id) >= self._max:
                return None
            seg = Segment(self._next, data)
            self._next += 1
            self._by_id[seg.seg_id] = seg
            return seg

    def ref(self, seg):
        with self._mu:
            seg.refs += 1
        return seg

    def deref(self, seg):
        with self._mu:
            seg.refs -= 1
            if seg.refs == 0:
                del self._by_id[seg.seg_id]


class Quota:
    def __init__(self, prefetch):
        self.prefetch = prefetch
        self.used = 0
        self._cv = threading.Condition()

    def grab(self, block=True, timeout=None):
        with self._cv:
            if not block and self.used >= self.prefetch:
                return False
            if not self._cv.wait_for(lambda: self.used < self.prefetch, timeout):
                return False
            self.used += 1
            return True

    def drop(self):
        with self._cv:
            self.used -= 1
            self._cv.notify()


@dataclass
class Delivery:
    tag: int
    seg: Segment
    consumer: "Consumer"
    deadline: float
    redelivered: bool = False


@dataclass
class Consumer:
    name: str
    quota: Quota
    paused: bool = False
    box: collections.deque = field(default_factory=collections.deque)


class TopicQueue:
    def __init__(self, name, store: SegmentStore, dead=None, lease_s=30.0):
        self.name = name
        self.store = store
        self.dead = dead
        self.lease_s = lease_s
        self._ready = collections.deque()
        self._unacked = {}
        self._delayed = []
        self._tag = 0
        self._mu = threading.RLock()

    # -- producers -------------------------------------------------------
    def publish(self, data, delay=0.0):
        seg = self.store.store(data)  # clean: near miss, moved into _delayed or _ready, whose segments ack, nack and purge deref
        if seg is None:
            return False
        with self._mu:
            if delay > 0:
                heapq.heappush(self._delayed, (time.monotonic() + delay, seg.seg_id, seg))
            else:
                self._ready.append(seg)
        return True

    def publish_batch(self, batch, limit=1024):
        segs = []
        for data in batch:
            seg = self.store.store(data)  # leak: a full store returns 0 and the segments made so far are dropped
            if seg is None:
                return 0
            segs.append(seg)
        with self._mu:
            self._ready.extend(segs)
        return len(segs)

    def enqueue(self, seg):
        with self._mu:
            self._ready.append(seg)

    # -- delivery --------------------------------------------------------
    def _due(self):
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            self._ready.append(heapq.heappop(self._delayed)[2])

    def _hand(self, consumer, seg):
        self._tag += 1
        d = Delivery(self._tag, seg, consumer, time.monotonic() + self.lease_s)
        self._unacked[d.tag] = d
        return d

    def deliver(self, consumer):
        if not consumer.quota.grab(timeout=0.1):  # leak: quota is kept when there is nothing ready
            return None
        with self._mu:
            self._due()
            if not self._ready:
                return None
            return self._hand(consumer, self._ready.popleft())

    def deliver_many(self, consumer, n):
        out = []
        while len(out) < n and consumer.quota.grab(block=False):  # clean: near miss, dropped when nothing is ready, else held by _unacked
            with self._mu:
                self._due()
                seg = self._ready.popleft() if self._ready else None
                if seg is None:
                    consumer.quota.drop()
                    break
                out.append(self._hand(consumer, seg))
        return out

    def dispatch(self, consumers):
        for c in consumers:
            if not c.quota.grab(block=False):  # leak: a paused consumer is skipped by `continue` with its quota taken
                continue
            if c.paused:
                continue
            with self._mu:
                if not self._ready:
                    c.quota.drop()
                    return
                c.box.append(self._hand(c, self._ready.popleft()))

    def ack(self, tag):
        with self._mu:
            d = self._unacked.pop(tag, None)
        if d is None:
            return False
        d.consumer.quota.drop()
        self.store.deref(d.seg)
        return True

    def nack(self, tag, requeue=True):
        with self._mu:
            d = self._unacked.pop(tag, None)
            if d is None:
                return
            if requeue:
                self._ready.appendleft(d.seg)
        d.consumer.quota.drop()
        if not requeue:
            if self.dead is not None:
                self.dead.enqueue(d.seg)
            else:
                self.store.deref(d.seg)

    def expire(self):
        now = time.monotonic()
        with self._mu:
            late = [d for d in self._unacked.values() if d.deadline < now]
        for d in late:
            self.nack(d.tag, requeue=not d.redelivered)

    def purge(self):
        with self._mu:
            ready, self._ready = list(self._ready), collections.deque()
            delayed, self._delayed = self._delayed, []
        for seg in ready:
            self.store.deref(seg)
        for _, _, seg in delayed:
            self.store.deref(seg)


class Replayer:
    """Keeps the last payloads of a topic so late ranks can catch up."""

    def __init__(self, store, depth):
        self.store = store
        self.depth = depth
        self._ring = collections.deque()
        self._last = None

    def remember(self, seg):
        self._ring.append(self.store.ref(seg))  # clean: near miss, the ring holds it, the oldest is dereffed when it overflows
        if len(self._ring) > self.depth:
            self.store.deref(self._ring.popleft())

    def set_last(self, seg):
        self._last = self.store.ref(seg)  # leak: the reference on the previous segment is overwritten

    def close(self):
        while self._ring:
            self.store.deref(self._ring.popleft())
        if self._last is not None:
            self.store.deref(self._last)
            self._last = None
