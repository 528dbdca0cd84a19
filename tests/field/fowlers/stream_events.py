"""Side streams and timing events for overlapping communication with computation."""
from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional, Sequence

import torch


class StreamPool:
    """Side streams by priority. lend() makes one when the shelf is empty; giveback() shelves it."""

    def __init__(self, device: Optional[int] = None) -> None:
        self._device = device
        self._shelf: dict[int, list[torch.cuda.Stream]] = defaultdict(list)
        self._lock = threading.Lock()
        self.lent = 0

    def lend(self, priority: int = 0) -> torch.cuda.Stream:
        with self._lock:
            self.lent += 1
            if self._shelf[priority]:
                return self._shelf[priority].pop()
        return torch.cuda.Stream(self._device, priority=priority)

    def giveback(self, stream: torch.cuda.Stream) -> None:
        with self._lock:
            self.lent -= 1
            self._shelf[stream.priority].append(stream)


class EventPool:
    def __init__(self, size: int) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(size)]
        self._free = list(range(size))

    def get_event(self) -> tuple[int, torch.cuda.Event]:
        index = self._free.pop()
        return index, self._events[index]

    def put_event(self, index: int) -> None:
        self._free.append(index)


streams = StreamPool()
events = EventPool(512)


def forked(priority: int = 0) -> torch.cuda.Stream:
    """A side stream which waits for what has been enqueued so far."""
    s = streams.lend(priority)  # clean: handed on to the caller
    s.wait_stream(torch.cuda.current_stream())
    return s


def forked_high() -> torch.cuda.Stream:
    return forked(-1)  # clean: handed on to the caller


def joined(s: torch.cuda.Stream) -> None:
    torch.cuda.current_stream().wait_stream(s)
    streams.giveback(s)


@contextmanager
def side_stream(priority: int = 0) -> Iterator[torch.cuda.Stream]:
    s = forked(priority)  # clean: joined() gives it back
    try:
        with torch.cuda.stream(s):
            yield s
    finally:
        joined(s)


class Stopwatch:
    """Two events; elapsed() may be asked once, after which the events are back in the pool."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._i0, self._start = events.get_event()  # clean: near miss, elapsed puts it back
        self._i1, self._stop = events.get_event()  # clean: near miss, elapsed puts it back

    def __enter__(self) -> "Stopwatch":
        self._start.record()
        return self

    def __exit__(self, *exc) -> None:
        self._stop.record()

    def elapsed(self) -> float:
        self._stop.synchronize()
        ms = self._start.elapsed_time(self._stop)
        events.put_event(self._i0)
        events.put_event(self._i1)
        return ms


def timed_if_slow(label: str, fn: Callable[[], Any], sink: dict[str, float], size: int) -> Any:
    watch = Stopwatch(label)  # leak: elapsed is asked for large sizes only, the events stay out else
    with watch:
        out = fn()
    if size > 1 << 20:
        sink[label] = watch.elapsed()
    return out


def overlap_many(compute: Callable[[], torch.Tensor], comms: Sequence[Callable[[], None]]) -> torch.Tensor:
    lent = []
    for comm in comms:
        s = forked_high()  # clean: near miss, all in the list are joined
        with torch.cuda.stream(s):
            comm()
        lent.append(s)
    out = compute()
    while lent:
        joined(lent.pop())
    return out


def overlap_pairs(pairs: Sequence[tuple[Callable[[], None], Callable[[], None]]]) -> int:
    done = 0
    for left, right in pairs:
        a = forked()  # clean: joined at the end of the round
        b = forked_high()  # leak: it is waited for but not given back
        with torch.cuda.stream(a):
            left()
        with torch.cuda.stream(b):
            right()
        torch.cuda.current_stream().wait_stream(b)
        joined(a)
        done += 1
    return done


def copy_async(src: torch.Tensor, dst: torch.Tensor) -> None:
    s = forked()  # leak: the current stream waits for it, but it is not given back
    with torch.cuda.stream(s):
        dst.copy_(src, non_blocking=True)
        src.record_stream(s)
    torch.cuda.current_stream().wait_stream(s)


def copy_async_wait(src: torch.Tensor, dst: torch.Tensor, wait: bool) -> Optional[torch.cuda.Stream]:
    """Without `wait` the caller joins the stream."""
    s = forked()  # clean: near miss, joined here or handed on according to the flag
    with torch.cuda.stream(s):
        dst.copy_(src, non_blocking=True)
    if wait:
        joined(s)
        return None
    return s


def double_copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    behind: Optional[torch.cuda.Stream] = None
    for src, dst in pairs:
        s = copy_async_wait(src, dst, wait=False)  # clean: near miss, joined one round later or after the loop
        if behind is not None:
            joined(behind)
        behind = s
    if behind is not None:
        joined(behind)


def first_copy(pairs: Sequence[tuple], fits: Callable[[torch.Tensor], bool]) -> int:
    for n, (src, dst) in enumerate(pairs):
        s = copy_async_wait(src, dst, wait=False)  # leak: the copy that fits returns before its stream is joined
        if fits(dst):
            return n
        joined(s)
    return -1


def on_side_stream(priority: int) -> Callable:
    """Decorator: the function's kernels go to a side stream of its own."""

    def wrap(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def inner(*args, **kwargs):
            with side_stream(priority):  # clean: the context manager joins it
                return fn(*args, **kwargs)

        return inner

    return wrap


@on_side_stream(-1)
def scale_grads(grads: Sequence[torch.Tensor], factor: float) -> None:
    for g in grads:
        g.mul_(factor)


class Marks:
    """Named points in time on the current stream."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._marks: dict[str, tuple[int, torch.cuda.Event]] = {}
        self._checkpoints: list[tuple[int, torch.cuda.Event]] = []

    def mark(self, name: str) -> None:
        previous = self._marks.get(name)
        index, ev = events.get_event()  # clean: near miss, clear puts it back, or the next mark of the name
        ev.record()
        self._marks[name] = (index, ev)
        if previous is not None:
            events.put_event(previous[0])

    def checkpoint(self) -> int:
        index, ev = events.get_event()  # leak: clear empties the checkpoints without putting them back
        ev.record()
        self._checkpoints.append((index, ev))
        return next(self._serial)

    def between(self, a: str, b: str) -> float:
        torch.cuda.synchronize()
        return self._marks[a][1].elapsed_time(self._marks[b][1])

    def clear(self) -> None:
        for index, _ in self._marks.values():
            events.put_event(index)
        self._marks.clear()
        self._checkpoints.clear()
