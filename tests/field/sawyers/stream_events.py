"""Stream and event pools for overlapping layer copies with compute."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Optional

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger("overlap")


class FakeEvent:
    def __init__(self) -> None:
        self.recorded = False

    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        self.recorded = True


def _new_event() -> Any:
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.Event(enable_timing=False)
    return FakeEvent()


class EventPool:
    """Events are made on demand, at most `cap` of them, and reused for ever after."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._made = 0
        self._spare: list[Any] = []

    def get_event(self) -> Any:
        if self._spare:
            return self._spare.pop()
        if self._made == self.cap:
            raise RuntimeError("event pool exhausted")
        self._made += 1
        return _new_event()

    def put_event(self, ev: Any) -> None:
        self._spare.append(ev)


class StreamSet:
    """Fixed streams, lent by index through a bit mask."""

    def __init__(self, n: int) -> None:
        self._mask = (1 << n) - 1
        self.n = n

    def claim(self) -> int:
        """Returns -1 when every stream is lent."""
        if not self._mask:
            return -1
        idx = (self._mask & -self._mask).bit_length() - 1
        self._mask &= ~(1 << idx)
        return idx

    def unclaim(self, idx: int) -> None:
        self._mask |= 1 << idx


@dataclass
class LayerCopy:
    layer: int
    event: Any
    stream: int = -1


class LayerPrefetcher:
    def __init__(self, events: EventPool, streams: StreamSet, copy: Callable[[int, int], None]) -> None:
        self.events = events
        self.streams = streams
        self.copy = copy
        self.inflight: deque[LayerCopy] = deque()
        self.ready: dict[int, Any] = {}

    def prefetch(self, layer: int) -> bool:
        stream = self.streams.claim()  # clean: goes back when the copy is reaped
        if stream < 0:
            return False
        ev = self.events.get_event()  # clean: in flight, reap() puts it back
        self.copy(layer, stream)
        ev.record(stream)
        self.inflight.append(LayerCopy(layer, ev, stream))
        return True

    def reap(self) -> list[int]:
        done: list[int] = []
        while self.inflight and self.inflight[0].event.query():
            item = self.inflight.popleft()
            self.events.put_event(item.event)
            self.streams.unclaim(item.stream)
            done.append(item.layer)
        return done

    def prefetch_guarded(self, layer: int, skip: set[int]) -> bool:
        stream = self.streams.claim()  # leak: a layer in skip returns with the stream claimed
        if stream < 0 or layer in skip:
            return False
        self.copy(layer, stream)
        self.streams.unclaim(stream)
        return True

    def load_now(self, layer: int) -> bool:
        stream = self.streams.claim()  # clean: near miss, -1 is the only way past without unclaim
        if stream != -1:
            self.copy(layer, stream)
            self.streams.unclaim(stream)
        return stream != -1

    def load_if(self, layer: int) -> bool:
        stream = self.streams.claim()  # leak: stream 0 is claimed and never given back
        if stream > 0:
            self.copy(layer, stream)
            self.streams.unclaim(stream)
            return True
        return False

    def mark(self, layer: int) -> None:
        ev = self.events.get_event()  # leak: marking a layer again overwrites its event
        ev.record()
        self.ready[layer] = ev

    def wait(self, layer: int) -> None:
        ev = self.ready.pop(layer, None)
        if ev is None:
            return
        ev.synchronize()
        self.events.put_event(ev)


class Timer:
    def __init__(self, events: EventPool) -> None:
        self.events = events
        self._start: Optional[Any] = None
        self._end: Optional[Any] = None

    def start(self) -> None:
        if self._start is None:
            self._start = self.events.get_event()  # clean: near miss, taken only when there is none
        self._start.record()

    def stop(self) -> None:
        if self._end is None:
            self._end = self.events.get_event()  # clean: put back by reset()
        self._end.record()

    def reset(self) -> None:
        if self._start is not None:
            self.events.put_event(self._start)
        if self._end is not None:
            self.events.put_event(self._end)
        self._start = self._end = None


class SpanTimer:
    def __init__(self, events: EventPool, enabled: bool) -> None:
        self.events = events
        self.enabled = enabled
        self.open_spans: list[tuple[str, Any, Any]] = []

    def begin(self, name: str) -> None:
        if not self.enabled:
            return
        head = self.events.get_event()  # clean: put back in flush()
        head.record()
        tail = self.events.get_event()  # leak: flush() puts only the head back
        self.open_spans.append((name, head, tail))

    def end(self) -> None:
        if self.enabled:
            self.open_spans[-1][2].record()

    def flush(self) -> list[str]:
        names: list[str] = []
        for name, head, tail in self.open_spans:
            tail.synchronize()
            self.events.put_event(head)
            names.append(name)
        self.open_spans = []
        return names


class Overlap:
    def __init__(self, events: EventPool, streams: StreamSet, verbose: bool = False) -> None:
        self.events = events
        self.streams = streams
        self.verbose = verbose

    def fence(self, work: Callable[[], None]) -> None:
        ev = self.events.get_event() if self.verbose else None  # clean: near miss, both tests read the same flag
        work()
        if self.verbose:
            assert ev is not None
            ev.record()
            self.events.put_event(ev)

    def run_layers(self, layers: list[int], compute: Callable[[int], bool]) -> int:
        side = self.streams.claim()  # clean: given back after the loop on both ways
        done = 0
        for layer in layers:
            ev = self.events.get_event()  # leak: the break keeps the event of the stopping layer
            if not compute(layer):
                break
            ev.record(side)
            self.events.put_event(ev)
            done += 1
        if side != -1:
            self.streams.unclaim(side)
        return done

    def join(self, n: int) -> None:
        evs = [self.events.get_event() for _ in range(n)]  # clean: every one is put back in the second loop
        for ev in evs:
            ev.record()
        for ev in reversed(evs):
            ev.synchronize()
            self.events.put_event(ev)

    def first_ready(self, n: int) -> int:
        evs = [self.events.get_event() for _ in range(n)]  # leak: those after the first ready one are not put back
        for i, ev in enumerate(evs):
            if ev.query():
                self.events.put_event(ev)
                return i
            self.events.put_event(ev)
        return -1
