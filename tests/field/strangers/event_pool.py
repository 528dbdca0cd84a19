"""Recycling CUDA events; events are recorded, waited for and recycled."""
import collections
import contextlib


class Event:
    def __init__(self):
        self.recorded = False

    def record(self):
        self.recorded = True

    def query(self):
        return self.recorded


class EventPool:
    def __init__(self):
        self._events = collections.deque()

    def acquire_event(self):
        return self._events.popleft() if self._events else Event()

    def release_event(self, event):
        event.recorded = False
        self._events.append(event)


class Timeline:
    def __init__(self, pool):
        self.pool = pool
        self.outstanding = collections.deque()

    def mark(self, tag):
        event = self.pool.acquire_event()  # clean: near miss, in the deque until reap or flush
        event.record()
        self.outstanding.append((tag, event))

    def reap(self):
        done = []
        while self.outstanding and self.outstanding[0][1].query():
            tag, event = self.outstanding.popleft()
            self.pool.release_event(event)
            done.append(tag)
        return done

    def flush(self):
        for _, event in self.outstanding:
            self.pool.release_event(event)
        self.outstanding.clear()

    @contextlib.contextmanager
    def span(self):
        begin, end = self.pool.acquire_event(), None  # clean: near miss, released in finally with the end event
        try:
            begin.record()
            yield begin
            end = self.pool.acquire_event()  # clean: near miss, released in finally when it was made
            end.record()
        finally:
            self.pool.release_event(begin)
            if end is not None:
                self.pool.release_event(end)

    def elapsed(self, fn):
        start = self.pool.acquire_event()  # clean: released behind the call
        stop = self.pool.acquire_event()  # leak: the same event is released twice, this one never
        start.record()
        fn()
        stop.record()
        ok = start.query() and stop.query()
        self.pool.release_event(start)
        self.pool.release_event(start)
        return ok

    def fence(self, streams):
        fences = {}
        for stream in streams:
            event = self.pool.acquire_event()  # leak: a stream listed twice overwrites its fence
            event.record()
            fences[stream] = event
        ready = all(e.query() for e in fences.values())
        for event in fences.values():
            self.pool.release_event(event)
        return ready

    def fence_unique(self, streams):
        fences = {}
        for stream in streams:
            if stream in fences:
                continue
            event = self.pool.acquire_event()  # clean: near miss, one per distinct stream, all released
            event.record()
            fences[stream] = event
        ready = all(e.query() for e in fences.values())
        while fences:
            _, event = fences.popitem()
            self.pool.release_event(event)
        return ready
