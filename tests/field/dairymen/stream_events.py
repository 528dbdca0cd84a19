"""Event and stream reuse for overlapped copies.

cudaEventCreate is slow enough to show in a profile, hence the pool.  An event is
`drawn` to mark a point in a stream and `returned` once somebody has waited on it.
Side streams are `borrowed` for a copy and `repaid` after it.
"""
import logging
import queue
import threading
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Callable, Optional

import torch

LOG = logging.getLogger(__name__)


class EventPool:
    def __init__(self, timing: bool = False, cap: int = 256):
        self.timing = timing
        self.cap = cap
        self._spare: deque = deque(torch.cuda.Event(enable_timing=timing) for _ in range(cap))
        self._lock = threading.Lock()
        self._marks = defaultdict(int)

    def draw(self, why: str = ""):
        with self._lock:
            self._marks[why] += 1
            if not self._spare:
                return None
            return self._spare.popleft()  # clean: handed to the caller

    def draw_recorded(self, stream, why=""):
        ev = self.draw(why)  # clean: returned, None included
        if ev is not None:
            ev.record(stream)
        return ev

    def restore(self, ev):
        if ev is None:
            return
        with self._lock:
            self._spare.append(ev)

    def collect(self, events):
        """Return those that have completed, give the others to the caller."""
        rest = []
        for ev in events:
            if ev.query():
                self.restore(ev)
            else:
                rest.append(ev)
        return rest

    def compact(self):
        """Put completed events first; unfinished ones may sit in the pool too."""
        with self._lock:
            done, busy = [], []
            for _ in range(len(self._spare)):
                ev = self._spare.popleft()  # clean: near miss, each is in one of the two lists that are put back
                (done if ev.query() else busy).append(ev)
            self._spare.extend(done)
            self._spare.extend(busy)

    def rebuild(self, timing: bool):
        """Swap in events with timing, at the start of a profile."""
        with self._lock:
            kept = deque()
            while self._spare:
                ev = self._spare.popleft()  # leak: an event that has not completed leaves the pool without a successor
                if not ev.query():
                    continue
                kept.append(torch.cuda.Event(enable_timing=timing))
            self._spare = kept
            self.timing = timing


class StreamBank:
    def __init__(self, n: int = 4, device=None):
        self._q: queue.LifoQueue = queue.LifoQueue()
        for _ in range(n):
            self._q.put(torch.cuda.Stream(device))

    def borrow(self, block: bool = True):
        try:
            return self._q.get(block=block)  # clean: handed to the caller
        except queue.Empty:
            return None

    def repay(self, s):
        self._q.put(s)


class Borrowed:
    """with Borrowed(bank) as stream: the stream is current inside."""

    def __init__(self, bank):
        self.bank = bank
        self.stream = None
        self._ctx = None

    def __enter__(self):
        self.stream = self.bank.borrow()  # clean: __exit__ repays it
        self._ctx = torch.cuda.stream(self.stream)
        self._ctx.__enter__()
        return self.stream

    def __exit__(self, *exc):
        self._ctx.__exit__(*exc)
        self.bank.repay(self.stream)
        self.stream = None
        return False


@dataclass
class PendingCopy:
    dst: torch.Tensor
    event: object
    on_done: Optional[Callable] = None


class CopyEngine:
    """Host copies in the background, polled from the step loop."""

    def __init__(self, bank: StreamBank, events: EventPool):
        self.bank, self.events = bank, events
        self.pending: deque[PendingCopy] = deque()
        self.by_tag: dict = {}

    def to_host(self, src, on_done=None):
        dst = torch.empty(src.shape, dtype=src.dtype, pin_memory=True)
        with Borrowed(self.bank) as s:  # clean: repaid by the context manager
            s.wait_stream(torch.cuda.default_stream())
            dst.copy_(src, non_blocking=True)
            ev = self.events.draw_recorded(s, "to_host")  # clean: near miss, poll() or drain() restore it from pending
        if ev is None:
            torch.cuda.synchronize()
            if on_done:
                on_done(dst)
            return dst
        self.pending.append(PendingCopy(dst, ev, on_done))
        return dst

    def to_host_tagged(self, tag, src):
        """Only the newest copy of a tag is of interest."""
        dst = torch.empty(src.shape, dtype=src.dtype, pin_memory=True)
        s = self.bank.borrow()  # clean: repaid before the function ends
        with torch.cuda.stream(s):
            dst.copy_(src, non_blocking=True)
        ev = self.events.draw_recorded(s, tag)  # leak: the entry of an earlier copy with this tag is overwritten with its event
        self.bank.repay(s)
        self.by_tag[tag] = (dst, ev)
        return dst

    def wait_tag(self, tag):
        dst, ev = self.by_tag.pop(tag)
        if ev is None:
            torch.cuda.synchronize()
            return dst
        ev.synchronize()
        self.events.restore(ev)
        return dst

    def to_device(self, src, dst):
        s = self.bank.borrow(block=False)  # leak: for sizes that differ the early return comes before repay
        if s is None:
            dst.copy_(src)
            return True
        if src.numel() != dst.numel():
            LOG.warning("copy of %s into %s refused", tuple(src.shape), tuple(dst.shape))
            return False
        with torch.cuda.stream(s):
            dst.view(-1).copy_(src.view(-1), non_blocking=True)
        torch.cuda.current_stream().wait_stream(s)
        self.bank.repay(s)
        return True

    def poll(self):
        n = 0
        while self.pending and self.pending[0].event.query():
            c = self.pending.popleft()
            self.events.restore(c.event)
            if c.on_done:
                c.on_done(c.dst)
            n += 1
        return n

    def drain(self):
        while self.pending:
            c = self.pending.popleft()
            c.event.synchronize()
            self.events.restore(c.event)
            if c.on_done:
                c.on_done(c.dst)
        for tag in list(self.by_tag):
            self.wait_tag(tag)


class Section:
    """Times a region with a pair of events; `report` is called once with milliseconds."""

    def __init__(self, events, name, report):
        self.events, self.name, self.report = events, name, report
        self.a = self.b = None

    def begin(self):
        self.a = self.events.draw_recorded(torch.cuda.current_stream(), self.name)  # leak: settle() restores only b when there is no report
        return self

    def end(self):
        self.b = self.events.draw_recorded(torch.cuda.current_stream(), self.name)  # clean: near miss, settle() restores it on both paths

    def settle(self):
        if self.a is None or self.b is None:
            self.events.restore(self.a)
            self.events.restore(self.b)
            return
        self.b.synchronize()
        if self.report is None:
            self.events.restore(self.b)
            return
        self.report(self.name, self.a.elapsed_time(self.b))
        self.events.restore(self.a)
        self.events.restore(self.b)


def fence(events, producer, consumers):
    """All the consumers wait for the producer."""
    ev = events.draw_recorded(producer, "fence")  # clean: restored after the waits, None has its own branch
    if ev is None:
        producer.synchronize()
        return
    for c in consumers:
        c.wait_event(ev)
    events.restore(ev)


def chain(events, streams, work):
    """Run work[i] on streams[i], each after the one before it."""
    prev = None
    for s, w in zip(streams, work):
        with torch.cuda.stream(s):
            if prev is not None:
                s.wait_event(prev)
            w()
        events.restore(prev)
        prev = events.draw_recorded(s, "chain")  # leak: the event of the last round is neither waited for nor restored
    torch.cuda.current_stream().wait_stream(streams[-1])


def guard(tensor, events):
    """Keep an event with a tensor and restore it when the tensor dies."""
    ev = events.draw_recorded(torch.cuda.current_stream(), "guard")  # clean: near miss, the finalizer restores it
    if ev is not None:
        weakref.finalize(tensor, events.restore, ev)
    return tensor
