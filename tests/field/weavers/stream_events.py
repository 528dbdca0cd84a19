"""Side streams, events and staging slots for copies that overlap with compute."""
from __future__ import annotations

import heapq
import logging
from concurrent.futures import Executor, Future
from typing import Callable, Dict, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None

_log = logging.getLogger(__name__)


class SideStream:
    def __init__(self, prio: int) -> None:
        self.prio = prio
        self.work: List[Callable[[], None]] = []

    def enqueue(self, fn: Callable[[], None]) -> None:
        self.work.append(fn)

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()


class StreamPool:
    def __init__(self, n: int) -> None:
        self._parked = [SideStream(i % 2) for i in range(n)]

    def pick(self) -> Optional[SideStream]:
        return self._parked.pop() if self._parked else None

    def park(self, s: SideStream) -> None:
        self._parked.append(s)


class EventPool:
    """Events are plain integers; `fetch` hands out the smallest, `recycle` returns it."""

    def __init__(self, n: int) -> None:
        self._heap = list(range(n))

    def fetch(self) -> int:
        if not self._heap:
            raise RuntimeError("out of events")
        return heapq.heappop(self._heap)

    def recycle(self, ev: int) -> None:
        heapq.heappush(self._heap, ev)


class CopyEngine:
    def __init__(self, streams: StreamPool, events: EventPool, ex: Executor) -> None:
        self.streams = streams
        self.events = events
        self.ex = ex
        self._open: List[Tuple[int, SideStream]] = []
        self._by_layer: Dict[int, int] = {}

    def copy_async(self, src: bytearray, dst: bytearray) -> bool:
        """Start a copy. `reap` collects it."""
        s = self.streams.pick()  # clean: near miss, parked on the event failure, else kept in the open list until reap
        if s is None:
            dst[:] = src
            return False
        try:
            ev = self.events.fetch()  # clean: kept in the open list until reap
        except RuntimeError:
            self.streams.park(s)
            dst[:] = src
            return False
        s.enqueue(lambda: dst.__setitem__(slice(None), src))
        self._open.append((ev, s))
        return True

    def reap(self) -> int:
        n = 0
        for ev, s in self._open:
            s.synchronize()
            self.streams.park(s)
            self.events.recycle(ev)
            n += 1
        self._open.clear()
        return n

    def copy_then(self, src: bytearray, dst: bytearray, then: Callable[[], None]) -> Optional[Future]:
        s = self.streams.pick()  # clean: near miss, the callback parks it
        if s is None:
            return None
        s.enqueue(lambda: dst.__setitem__(slice(None), src))
        fut = self.ex.submit(s.synchronize)

        def on_done(_: Future) -> None:
            self.streams.park(s)
            then()

        fut.add_done_callback(on_done)
        return fut

    def scatter_then(self, srcs: List[bytearray], dst: List[bytearray], then: Callable[[int], None]) -> Optional[Future]:
        s = self.streams.pick()  # leak: the callback parks the stream only if the future succeeded
        if s is None:
            return None
        for a, b in zip(srcs, dst):
            s.enqueue(lambda a=a, b=b: b.__setitem__(slice(None), a))
        fut = self.ex.submit(s.synchronize)

        def on_done(f: Future) -> None:
            if f.exception() is not None:
                _log.error("scatter failed: %s", f.exception())
                return
            self.streams.park(s)
            then(len(srcs))

        fut.add_done_callback(on_done)
        return fut

    def mark_layer(self, layer: int) -> int:
        self._by_layer[layer] = self.events.fetch()  # leak: a layer marked again before wait_layer overwrites its event
        return self._by_layer[layer]

    def wait_layer(self, layer: int) -> None:
        ev = self._by_layer.pop(layer, None)
        if ev is not None:
            self.events.recycle(ev)

    def prefer_high(self) -> Optional[SideStream]:
        """A stream of high priority if one is idle, any other otherwise; the caller parks it."""
        s = self.streams.pick()  # leak: a low-priority stream is rebound by the second pick when that succeeds
        if s is not None and s.prio == 0:
            other = self.streams.pick()  # clean: returned to the caller when there is one
            s = other if other is not None else s
        return s

    def prefetch_layers(self, layers: Dict[int, bytearray], dst: bytearray) -> int:
        moved = 0
        stream = self.prefer_high()  # clean: near miss, the loop's early exit leads to the park
        if stream is None:
            return 0
        for layer, data in sorted(layers.items()):
            if len(data) > len(dst):
                break
            stream.enqueue(lambda d=data: dst.__setitem__(slice(0, len(d)), d))
            moved += 1
        stream.synchronize()
        self.streams.park(stream)
        return moved

    def timed(self, fn: Callable[[], None], record: bool) -> Optional[int]:
        start = self.events.fetch()  # leak: an unrecorded run recycles only the end event
        end = self.events.fetch()  # clean: recycled on both ways
        fn()
        if not record:
            self.events.recycle(end)
            return None
        span = end - start
        self.events.recycle(start)
        self.events.recycle(end)
        return span
