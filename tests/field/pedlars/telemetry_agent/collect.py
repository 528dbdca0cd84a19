"""Collectors: they fill event slots and pass them to the batcher."""
import time
from typing import Callable, Dict, List, Optional

from .ring import Event, EventRing


class Batcher:
    """Owns events from offer() on, until they are flushed to the sink."""

    def __init__(self, ring: EventRing, limit: int, sink: Callable[[List[Event]], None]) -> None:
        self.ring = ring
        self.limit = limit
        self.sink = sink
        self.batch: List[Event] = []

    def offer(self, ev: Event) -> bool:
        """True when the batch took it over."""
        if len(self.batch) >= self.limit:
            return False
        self.batch.append(ev)
        return True

    def flush(self) -> int:
        events, self.batch = self.batch, []
        self.sink(events)
        for ev in events:
            self.ring.drop(ev)
        return len(events)


class Collector:
    def __init__(self, ring: EventRing, batcher: Batcher) -> None:
        self.ring = ring
        self.batcher = batcher
        self.last: Dict[str, float] = {}

    def gauge(self, name: str, value: float) -> bool:
        ev = self.ring.grab()  # clean: dropped when the batcher won't take it
        if ev is None:
            return False
        ev.name, ev.value, ev.stamp = name, value, time.time()
        if not self.batcher.offer(ev):
            self.ring.drop(ev)
            return False
        return True

    def counter(self, name: str, value: float) -> None:
        ev = self.ring.grab()  # leak: offer() may refuse it and nobody looks
        if ev is None:
            return
        ev.name, ev.stamp = name, time.time()
        ev.value = value - self.last.get(name, 0.0)
        self.last[name] = value
        self.batcher.offer(ev)

    def delta(self, name: str, value: float) -> bool:
        ev = self.ring.grab()  # leak: an unchanged value returns with the slot
        if ev is None:
            return False
        before = self.last.get(name)
        self.last[name] = value
        if before == value:
            return False
        ev.name, ev.value, ev.stamp = name, value, time.time()
        if self.batcher.offer(ev):
            return True
        self.ring.drop(ev)
        return False

    def labelled(self, name: str, labels: Dict[str, str]) -> bool:
        ev = self.ring.grab_named(name)  # clean: near miss, offered or dropped by the flag
        if ev is None:
            return False
        ev.labels.update(labels)
        taken = self.batcher.offer(ev)
        if not taken:
            self.ring.drop(ev)
        return taken

    def histogram(self, name: str, counts: List[int]) -> int:
        events = self.ring.grab_many(len(counts))  # leak: zero buckets are skipped and never dropped
        used = 0
        for ev, n in zip(events, counts):
            if n == 0:
                continue
            ev.name, ev.value = name, float(n)
            if self.batcher.offer(ev):
                used += 1
            else:
                self.ring.drop(ev)
        return used

    def summary(self, name: str, values: List[float]) -> int:
        events = self.ring.grab_many(len(values))  # clean: each is offered or dropped
        used = 0
        for ev, v in zip(events, values):
            ev.name, ev.value = name, v
            if v == v and self.batcher.offer(ev):
                used += 1
                continue
            self.ring.drop(ev)
        return used


class Span:
    """One traced operation; its event is offered at the end."""

    def __init__(self, collector: Collector, name: str) -> None:
        self.collector = collector
        self.name = name
        self.ev: Optional[Event] = None
        self.sampled = True

    def __enter__(self) -> "Span":
        self.ev = self.collector.ring.grab()  # leak: __exit__ returns early for spans not sampled
        if self.ev is not None:
            self.ev.stamp = time.time()
        return self

    def __exit__(self, kind, exc, tb) -> bool:
        if not self.sampled or self.ev is None:
            return False
        self.ev.name = self.name
        self.ev.value = time.time() - self.ev.stamp
        if not self.collector.batcher.offer(self.ev):
            self.collector.ring.drop(self.ev)
        self.ev = None
        return False


class Timer:
    def __init__(self, collector: Collector, name: str) -> None:
        self.collector = collector
        self.name = name
        self.ev: Optional[Event] = None
        self.quiet = False

    def __enter__(self) -> "Timer":
        self.ev = self.collector.ring.grab()  # clean: near miss, dropped for quiet timers as well
        if self.ev is not None:
            self.ev.stamp = time.time()
        return self

    def __exit__(self, kind, exc, tb) -> bool:
        ev, self.ev = self.ev, None
        if ev is None:
            return False
        if self.quiet:
            self.collector.ring.drop(ev)
            return False
        ev.name, ev.value = self.name, time.time() - ev.stamp
        if not self.collector.batcher.offer(ev):
            self.collector.ring.drop(ev)
        return False
