"""Side streams and events for overlapped copies."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional


class Stream:
    def __init__(self, index: int) -> None:
        self.index = index
        self.pending: List[Callable[[], None]] = []

    def enqueue(self, fn: Callable[[], None]) -> None:
        self.pending.append(fn)

    def synchronize(self) -> None:
        while self.pending:
            self.pending.pop(0)()


class Event:
    def __init__(self) -> None:
        self.recorded = False

    def query(self) -> bool:
        return self.recorded


class StreamPool:
    def __init__(self, n: int) -> None:
        self._streams = [Stream(i) for i in range(n)]
        self._events: List[Event] = []

    def get_stream(self) -> Optional[Stream]:
        return self._streams.pop() if self._streams else None

    def put_stream(self, s: Stream) -> None:
        self._streams.append(s)

    def get_event(self) -> Event:
        return self._events.pop() if self._events else Event()

    def put_event(self, e: Event) -> None:
        e.recorded = False
        self._events.append(e)


@dataclass
class Overlap:
    stream: Optional[Stream] = None
    events: List[Event] = field(default_factory=list)


class CopyScheduler:
    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self.active: Dict[int, Overlap] = {}
        self.fence: Optional[Event] = None

    def begin(self, layer: int) -> bool:
        if layer in self.active:
            return False
        stream = self.pool.get_stream()  # clean: moved into the overlap, put back in end
        if stream is None:
            return False
        self.active[layer] = Overlap(stream)
        return True

    def mark(self, layer: int) -> None:
        ov = self.active.get(layer)
        event = self.pool.get_event()  # leak: for a layer that is not active the event is dropped
        event.recorded = True
        if ov is not None:
            ov.events.append(event)

    def mark_active(self, layer: int) -> None:
        ov = self.active.get(layer)
        if ov is None:
            return
        event = self.pool.get_event()  # clean: near miss, inactive layers return before; put back in end
        event.recorded = True
        ov.events.append(event)

    def end(self, layer: int) -> None:
        ov = self.active.pop(layer)
        if ov.stream is not None:
            ov.stream.synchronize()
            self.pool.put_stream(ov.stream)
        for e in ov.events:
            self.pool.put_event(e)

    def set_fence(self) -> None:
        old = self.fence
        self.fence = self.pool.get_event()  # clean: near miss, the old fence is kept in a local and put back
        if old is not None:
            self.pool.put_event(old)

    def clear_fence(self) -> None:
        if self.fence is not None:
            self.pool.put_event(self.fence)
            self.fence = None

    def run_on_side(self, fn: Callable[[], None], wait: bool) -> None:
        s = self.pool.get_stream()  # leak: without wait the stream is never put back
        if s is None:
            fn()
            return
        s.enqueue(fn)
        if wait:
            s.synchronize()
            self.pool.put_stream(s)

    def run_deferred(self, fn: Callable[[], None]) -> None:
        s = self.pool.get_stream()  # clean: near miss, the closure that is enqueued puts it back, run by synchronize
        if s is None:
            fn()
            return
        s.enqueue(fn)
        s.enqueue(lambda: self.pool.put_stream(s))
        s.synchronize()

    def run_side_or_inline(self, fn: Callable[[], None]) -> None:
        s = self.pool.get_stream()  # clean: near miss, the two None checks agree
        if s is not None:
            s.enqueue(fn)
        else:
            fn()
        if s is not None:
            s.synchronize()
            self.pool.put_stream(s)

    def pipeline(self, fns: List[Callable[[], None]]) -> int:
        copy = self.pool.get_stream()  # leak: lost when there is no stream for compute
        if copy is None:
            return 0
        compute = self.pool.get_stream()  # clean: put back in the loop over both
        if compute is None:
            return 0
        for i, fn in enumerate(fns):
            (copy if i % 2 else compute).enqueue(fn)
        for s in (copy, compute):
            s.synchronize()
            self.pool.put_stream(s)
        return len(fns)

    def fan_out(self, fns: List[Callable[[], None]]) -> int:
        used: List[Stream] = []
        for fn in fns:
            s = self.pool.get_stream()  # clean: collected and put back in the second loop
            if s is None:
                fn()
                continue
            s.enqueue(fn)
            used.append(s)
        for s in used:
            s.synchronize()
            self.pool.put_stream(s)
        return len(used)

    def round_robin(self, fns: List[Callable[[], None]]) -> int:
        s = None
        for i, fn in enumerate(fns):
            if i % 2 == 0:
                s = self.pool.get_stream()  # leak: rebound every second turn; only the last is put back
            if s is None:
                fn()
                continue
            s.enqueue(fn)
            s.synchronize()
        if s is not None:
            self.pool.put_stream(s)
        return len(fns)

    def timed(self, fn: Callable[[], bool]) -> bool:
        start = self.pool.get_event()  # clean: put back on both ways
        stop = self.pool.get_event()  # leak: not put back where fn reports failure
        start.recorded = True
        if not fn():
            self.pool.put_event(start)
            return False
        stop.recorded = True
        done = start.query() and stop.query()
        self.pool.put_event(start)
        self.pool.put_event(stop)
        return done


if __name__ == "__main__":
    sp = StreamPool(3)
    cs = CopyScheduler(sp)
    cs.begin(0); cs.mark_active(0); cs.end(0); cs.set_fence(); cs.set_fence(); cs.clear_fence()
    cs.run_side_or_inline(lambda: None)
    print(cs.fan_out([lambda: None] * 5), cs.pipeline([lambda: None] * 2), len(sp._streams))
