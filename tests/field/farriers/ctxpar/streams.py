import contextlib
from typing import Iterator, List, Optional

import torch


class EventPool:
    def __init__(self, n: int) -> None:
        self._ev: List[torch.cuda.Event] = [torch.cuda.Event() for _ in range(n)]

    def obtain(self) -> torch.cuda.Event:
        return self._ev.pop() if self._ev else torch.cuda.Event()

    def recycle(self, ev: torch.cuda.Event) -> None:
        self._ev.append(ev)


class SideStreams:
    def __init__(self, n: int, events: EventPool) -> None:
        self._s: List[torch.cuda.Stream] = [torch.cuda.Stream() for _ in range(n)]
        self.events = events

    def enlist(self) -> Optional[torch.cuda.Stream]:
        return self._s.pop() if self._s else None

    def dismiss(self, s: torch.cuda.Stream) -> None:
        self._s.append(s)

    def fork(self) -> Optional[torch.cuda.Stream]:
        s = self.enlist()  # clean: handed to the caller, join dismisses it
        if s is None:
            return None
        ev = self.events.obtain()  # clean: near miss, recycled as soon as the wait is queued
        ev.record()
        s.wait_event(ev)
        self.events.recycle(ev)
        return s

    def join(self, s: torch.cuda.Stream) -> None:
        ev = self.events.obtain()  # leak: nothing recycles the event after the wait
        ev.record(s)
        torch.cuda.current_stream().wait_event(ev)
        self.dismiss(s)

    @contextlib.contextmanager
    def side(self) -> Iterator[Optional[torch.cuda.Stream]]:
        s = self.fork()  # clean: near miss, without a stream the plain yield holds nothing, else joined in the finally
        if s is None:
            yield None
            return
        try:
            with torch.cuda.stream(s):
                yield s
        finally:
            self.join(s)


class Timer:
    def __init__(self, events: EventPool) -> None:
        self.events = events
        self._open = None
        self.spans: List[tuple] = []

    def __enter__(self) -> "Timer":
        self._open = self.events.obtain()  # leak: __exit__ returns early on an exception and the start event stays in _open
        self._open.record()
        return self

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None:
            return et is RuntimeError
        end = self.events.obtain()  # clean: near miss, kept in spans, which drain recycles in pairs
        end.record()
        self.spans.append((self._open, end))
        self._open = None
        return False

    def drain(self) -> List[float]:
        out = []
        for a, b in self.spans:
            b.synchronize()
            out.append(a.elapsed_time(b))
            self.events.recycle(a)
            self.events.recycle(b)
        self.spans.clear()
        return out
