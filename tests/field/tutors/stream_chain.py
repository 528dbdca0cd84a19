"""Side streams and timing events for overlapped copies."""
from __future__ import annotations

import threading
from typing import Callable, Optional

import torch


class Link:
    """A stream in a singly linked list of free ones."""

    __slots__ = ("stream", "next")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.next: Optional["Link"] = None


class StreamChain:
    """Free side streams, linked head first."""

    def __init__(self, count: int) -> None:
        self._head: Optional[Link] = None
        self._lock = threading.Lock()
        for _ in range(count):
            self.hook(Link(torch.cuda.Stream()))

    def unhook(self) -> Optional[Link]:
        with self._lock:
            link = self._head
            if link is None:
                return None
            self._head = link.next
            link.next = None
            return link

    def unhook_pair(self) -> Optional[tuple[Link, Link]]:
        first = self.unhook()  # leak: lost when no second link is free
        if first is None:
            return None
        second = self.unhook()  # clean: goes to the caller with the first
        if second is None:
            return None
        return first, second

    def hook(self, link: Link) -> None:
        with self._lock:
            link.next = self._head
            self._head = link


_EVENTS: list[torch.cuda.Event] = []


def borrow_event() -> torch.cuda.Event:
    """Pop a timing event or make one."""
    return _EVENTS.pop() if _EVENTS else torch.cuda.Event(enable_timing=True)


def return_event(event: torch.cuda.Event) -> None:
    _EVENTS.append(event)


class HostCallbacks:
    """Runs functions once a stream has drained."""

    def __init__(self) -> None:
        self._queue: list[tuple[torch.cuda.Stream, Callable[[], None]]] = []

    def after(self, stream: torch.cuda.Stream, fn: Callable[[], None]) -> None:
        self._queue.append((stream, fn))

    def poll(self) -> None:
        ready = [item for item in self._queue if item[0].query()]
        self._queue = [item for item in self._queue if item not in ready]
        for _, fn in ready:
            fn()


class Overlapper:
    def __init__(self, chain: StreamChain, callbacks: HostCallbacks) -> None:
        self.chain = chain
        self.callbacks = callbacks
        self.by_layer: dict[int, Link] = {}

    def copy_later(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        link = self.chain.unhook()  # clean: near miss, the drain callback hooks it
        if link is None:
            return False
        with torch.cuda.stream(link.stream):
            dst.copy_(src, non_blocking=True)
        self.callbacks.after(link.stream, lambda: self.chain.hook(link))
        return True

    def copy_notify(self, src: torch.Tensor, dst: torch.Tensor, done: Callable[[], None]) -> bool:
        link = self.chain.unhook()  # leak: only the user's callback is queued, nothing hooks the link
        if link is None:
            return False
        with torch.cuda.stream(link.stream):
            dst.copy_(src, non_blocking=True)
        self.callbacks.after(link.stream, done)
        return True

    def begin_layer(self, layer: int) -> bool:
        if layer in self.by_layer:
            return True
        link = self.chain.unhook()  # clean: near miss, sits in by_layer until end_layer or reset
        if link is None:
            return False
        self.by_layer[layer] = link
        return True

    def end_layer(self, layer: int) -> None:
        self.chain.hook(self.by_layer.pop(layer))

    def reset(self) -> None:
        while self.by_layer:
            _, link = self.by_layer.popitem()
            self.chain.hook(link)

    def copy_timed(self, src: torch.Tensor, dst: torch.Tensor) -> float:
        start = borrow_event()  # clean: returned at the end
        stop = borrow_event()  # leak: only start is returned
        start.record()
        dst.copy_(src)
        stop.record()
        stop.synchronize()
        elapsed = start.elapsed_time(stop)
        return_event(start)
        return elapsed

    def copy_maybe_timed(self, src: torch.Tensor, dst: torch.Tensor, profile: bool) -> float:
        events = (borrow_event(), borrow_event()) if profile else ()  # clean: near miss, the loop returns however many there are
        if events:
            events[0].record()
        dst.copy_(src)
        if events:
            events[1].record()
            events[1].synchronize()
        elapsed = events[0].elapsed_time(events[1]) if events else 0.0
        for event in events:
            return_event(event)
        return elapsed

    def scatter(self, parts: list[torch.Tensor], dst: torch.Tensor) -> int:
        pair = self.chain.unhook_pair()  # leak: a single part returns before the pair is hooked
        if pair is None:
            return 0
        if len(parts) < 2:
            dst.copy_(parts[0])
            return 1
        for step, part in enumerate(parts):
            with torch.cuda.stream(pair[step % 2].stream):
                dst[step].copy_(part)
        for link in pair:
            self.chain.hook(link)
        return len(parts)
