"""In-process publish/subscribe for tensors.  Messages are reference counted frames."""
from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

logger = logging.getLogger("bus")
Handler = Callable[["Frame"], None]


@dataclass
class Frame:
    index: int
    data: torch.Tensor
    refs: int = 0
    topic: str = ""


class FrameStore:
    def __init__(self, n: int, numel: int) -> None:
        self.frames = [Frame(i, torch.zeros(numel)) for i in range(n)]
        self.idle = set(range(n))
        self.mu = threading.Lock()

    def alloc_frame(self, topic: str) -> Frame | None:
        with self.mu:
            if not self.idle:
                return None
            f = self.frames[self.idle.pop()]
            f.refs, f.topic = 1, topic
            return f

    def incref(self, f: Frame) -> Frame:
        with self.mu:
            f.refs += 1
        return f

    def decref(self, f: Frame) -> None:
        with self.mu:
            f.refs -= 1
            if f.refs == 0:
                self.idle.add(f.index)


@dataclass
class Subscription:
    topic: str
    inbox: queue.Queue = field(default_factory=lambda: queue.Queue(maxsize=8))
    last: Frame | None = None


class Bus:
    def __init__(self, store: FrameStore) -> None:
        self.store = store
        self.subs: dict[str, list[Subscription]] = {}
        self.handlers: dict[str, list[Handler]] = {}
        self.retained: dict[str, Frame] = {}

    def subscribe(self, topic: str) -> Subscription:
        s = Subscription(topic)
        self.subs.setdefault(topic, []).append(s)
        return s

    def publish(self, topic: str, t: torch.Tensor) -> bool:
        f = self.store.alloc_frame(topic)  # clean: the publisher's own reference is lowered at the end
        if f is None:
            return False
        f.data[: t.numel()].copy_(t.flatten())
        for s in self.subs.get(topic, ()):
            self.store.incref(f)  # clean: near miss, a full inbox lowers it again, else the subscriber does
            try:
                s.inbox.put_nowait(f)
            except queue.Full:
                self.store.decref(f)
        self.store.decref(f)
        return True

    def publish_sampled(self, topic: str, t: torch.Tensor, every: int, n: int) -> bool:
        f = self.store.alloc_frame(topic)  # leak: frames between the samples return unpublished
        if f is None:
            return False
        if n % every:
            return False
        f.data[: t.numel()].copy_(t.flatten())
        for s in self.subs.get(topic, ()):
            s.inbox.put(self.store.incref(f))  # clean: the subscriber lowers it
        self.store.decref(f)
        return True

    def publish_counting(self, f: Frame) -> int:
        n = 0
        for s in self.subs.get(f.topic, ()):
            self.store.incref(f)  # leak: a full inbox only counts
            try:
                s.inbox.put_nowait(f)
            except queue.Full:
                n += 1
        return n

    def retain(self, f: Frame) -> None:
        old = self.retained.pop(f.topic, None)
        if old is not None:
            self.store.decref(old)
        self.retained[f.topic] = self.store.incref(f)  # clean: near miss, the old one was lowered, unretain() lowers this

    def unretain(self, topic: str) -> None:
        f = self.retained.pop(topic, None)
        if f is not None:
            self.store.decref(f)

    def dispatch(self, f: Frame) -> None:
        for h in self.handlers.get(f.topic, []):
            self.store.incref(f)  # clean: finally lowers it for each handler
            try:
                h(f)
            finally:
                self.store.decref(f)

    def dispatch_first(self, f: Frame, want: Callable[[Handler], bool]) -> bool:
        for h in self.handlers.get(f.topic, []):
            self.store.incref(f)  # leak: handlers which are not wanted are skipped with the count raised
            if not want(h):
                continue
            h(f)
            self.store.decref(f)
            return True
        return False


class Reader:
    def __init__(self, bus: Bus, topic: str) -> None:
        self.bus = bus
        self.sub = bus.subscribe(topic)

    def read(self) -> torch.Tensor:
        f = self.sub.inbox.get()
        out = f.data.clone()
        self.bus.store.decref(f)
        return out

    def drain(self) -> int:
        n = 0
        while not self.sub.inbox.empty():
            self.bus.store.decref(self.sub.inbox.get())
            n += 1
        return n

    def remember(self, f: Frame) -> None:
        self.sub.last = self.bus.store.incref(f)  # leak: the frame remembered before is overwritten

    def forget(self) -> None:
        if self.sub.last is not None:
            self.bus.store.decref(self.sub.last)
            self.sub.last = None


def relay(bus: Bus, frames: Iterable[Frame], topic: str) -> int:
    n = 0
    for f in frames:
        dup = bus.store.alloc_frame(topic)  # clean: near miss, None leaves the loop, otherwise lowered below
        if dup is None:
            break
        dup.data.copy_(f.data)
        bus.dispatch(dup)
        bus.store.decref(dup)
        n += 1
    return n


def mix(bus: Bus, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    fa, fb = bus.store.alloc_frame("mix"), bus.store.alloc_frame("mix")  # leak: if only the second is missing, the first is lost
    if fa is None or fb is None:
        return None
    fa.data[: a.numel()].copy_(a.flatten())
    fb.data[: b.numel()].copy_(b.flatten())
    out = fa.data + fb.data
    bus.store.decref(fa)
    bus.store.decref(fb)
    return out
