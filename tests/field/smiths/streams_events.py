"""Side streams and events for overlapping copies with attention kernels."""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Callable, Iterable, Iterator, List, Optional


class LaunchError(RuntimeError):
    pass


class Event:
    def __init__(self) -> None:
        self.callbacks: List[Callable[[], None]] = []

    def on_complete(self, fn: Callable[[], None]) -> None:
        self.callbacks.append(fn)

    def complete(self) -> None:
        while self.callbacks:
            self.callbacks.pop()()


class EventPool:
    def __init__(self) -> None:
        self._idle: List[Event] = []
        self.in_use = 0

    def get_event(self) -> Event:
        self.in_use += 1
        return self._idle.pop() if self._idle else Event()

    def put_event(self, ev: Event) -> None:
        self.in_use -= 1
        self._idle.append(ev)


class StreamPool:
    def __init__(self, count: int) -> None:
        self._idle = list(range(count))
        self.total = count

    def take(self) -> int:
        if not self._idle:
            raise LaunchError("all streams busy")
        return self._idle.pop()

    def recycle(self, stream: int) -> None:
        self._idle.append(stream)

    @property
    def busy(self) -> int:
        return self.total - len(self._idle)


@contextmanager
def side_stream(pool: StreamPool) -> Iterator[int]:
    stream = pool.take()  # leak: a launch error survived in overlap_or_serial passes the recycle by
    yield stream
    pool.recycle(stream)


@contextmanager
def guarded_stream(pool: StreamPool) -> Iterator[int]:
    stream = pool.take()  # clean: finally
    try:
        yield stream
    finally:
        pool.recycle(stream)


class Overlap:
    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self.log: List[str] = []

    def _launch(self, stream: int, what: str) -> None:
        if not what:
            raise LaunchError("empty kernel")
        self.log.append(f"{stream}:{what}")

    def _stream(self) -> int:
        return self.streams.take()  # clean: wrapper, the caller gets it

    def _stream_for(self, what: str) -> int:
        stream = self._stream()  # clean: handed on
        self.log.append(f"assign {stream} {what}")
        return stream

    def overlap_or_serial(self, what: str) -> bool:
        try:
            with side_stream(self.streams) as stream:  # clean: with; the manager itself is at fault
                self._launch(stream, what)
                return True
        except LaunchError:
            return False

    def overlap_guarded(self, what: str) -> bool:
        try:
            with guarded_stream(self.streams) as stream:  # clean: with gives it back on the survived error too
                self._launch(stream, what)
                return True
        except LaunchError:
            return False

    def copy_async(self, what: str) -> Event:
        ev = self.events.get_event()  # clean: near miss, its completion callback puts it back
        ev.on_complete(lambda: self.events.put_event(ev))
        return ev

    def submit(self, what: str, after: Optional[Event] = None) -> None:
        stream = self._stream_for(what)  # leak: with an event to wait for, nothing recycles the stream
        if after is not None:
            after.on_complete(lambda: self._launch(stream, what))
            return
        self._launch(stream, what)
        self.streams.recycle(stream)

    def submit_after(self, what: str, after: Optional[Event] = None) -> None:
        stream = self._stream_for(what)  # clean: near miss, recycled at once or by the callback

        def finish() -> None:
            self._launch(stream, what)
            self.streams.recycle(stream)

        if after is None:
            finish()
        else:
            after.on_complete(finish)

    def timeline(self, parts: Iterable[str]) -> Iterator[int]:
        for i, part in enumerate(parts):
            ev = self.events.get_event()  # leak: first_slow stops at the yield and the event never goes back
            self.log.append(part)
            yield i
            self.events.put_event(ev)

    def first_slow(self, parts: Iterable[str], limit: int) -> int:
        for i in self.timeline(parts):
            if i >= limit:
                return i
        return -1

    def chunks(self, parts: Iterable[str]) -> Iterator[str]:
        ev = self.events.get_event()  # clean: near miss, finally runs when the generator is closed
        try:
            for part in parts:
                yield part.upper()
        finally:
            self.events.put_event(ev)

    def fan_out(self, parts: List[str]) -> int:
        with ExitStack() as stack:
            for part in parts:
                stream = self._stream()  # clean: near miss, the exit stack recycles it
                stack.callback(self.streams.recycle, stream)
                if not part:
                    return 0
                self._launch(stream, part)
        return len(parts)

    def gang(self, n: int) -> "Gang":
        with ExitStack() as stack:
            streams = []
            for _ in range(n):
                stream = self.streams.take()  # clean: near miss, pop_all moves the callbacks to the gang
                stack.callback(self.streams.recycle, stream)
                streams.append(stream)
            return Gang(streams, stack.pop_all())


class Gang:
    def __init__(self, streams: List[int], stack: ExitStack) -> None:
        self.streams = streams
        self._stack = stack

    def close(self) -> None:
        self._stack.close()


def main() -> None:
    ov = Overlap(StreamPool(4), EventPool())
    print(ov.overlap_guarded("qk"), ov.overlap_guarded(""), ov.fan_out(["a", ""]))
    ev = ov.copy_async("w")  # clean: near miss, completing it puts it back
    ov.submit_after("pv", ev)
    ev.complete()
    for part in ov.chunks(["x", "y"]):
        print(part)
        break
    gang = ov.gang(3)  # clean: closed below
    gang.close()
    print("busy:", ov.streams.busy, "events:", ov.events.in_use)


if __name__ == "__main__":
    main()
