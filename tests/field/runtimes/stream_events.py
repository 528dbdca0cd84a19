"""Stream and event pools used by the copy engine and the profiler."""
import contextlib
import threading

import torch


class EventPool:
    def __init__(self, prealloc=16):
        self._lock = threading.Lock()
        self._idle = [torch.cuda.Event(enable_timing=False) for _ in range(prealloc)]

    def get(self):
        with self._lock:
            if self._idle:
                return self._idle.pop()  # clean: returned to the caller
        return torch.cuda.Event(enable_timing=False)

    def put(self, event):
        with self._lock:
            self._idle.append(event)


class StreamPool:
    def __init__(self, size, priority=0):
        self._lock = threading.Lock()
        self._streams = [torch.cuda.Stream(priority=priority) for _ in range(size)]
        self._busy = [False] * size

    def borrow(self):
        with self._lock:
            for i, busy in enumerate(self._busy):
                if not busy:
                    self._busy[i] = True  # clean: the index goes to the caller
                    return i, self._streams[i]
        return None

    def give_back(self, index):
        with self._lock:
            self._busy[index] = False


class CopyEngine:
    def __init__(self, streams, events):
        self._streams = streams
        self._events = events
        self._inflight = []

    def copy(self, dst, src):
        slot = self._streams.borrow()  # clean: near miss, the None branch copies inline and the index is given back
        if slot is None:
            dst.copy_(src)
            return
        index, stream = slot
        try:
            with torch.cuda.stream(stream):
                dst.copy_(src, non_blocking=True)
            stream.synchronize()
        finally:
            self._streams.give_back(index)

    def copy_async(self, dst, src, stream):
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
        done = self._events.get()  # clean: near miss, stored in the inflight list which reap and shutdown empty
        done.record(stream)
        self._inflight.append((done, src))

    def reap(self):
        still = []
        for done, src in self._inflight:
            if done.query():
                self._events.put(done)
            else:
                still.append((done, src))
        self._inflight = still

    def fence(self, producer, consumer):
        ready = self._events.get()  # leak: the identical-stream shortcut returns with the event
        if producer == consumer:
            return
        ready.record(producer)
        consumer.wait_event(ready)
        self._events.put(ready)

    def broadcast(self, src, dsts):
        slot = self._streams.borrow()  # leak: a second failed borrow returns while this index is busy
        if slot is None:
            return False
        second = self._streams.borrow()  # clean: given back with its own index
        if second is None:
            return False
        for n, dst in enumerate(dsts):
            stream = (slot if n % 2 == 0 else second)[1]
            with torch.cuda.stream(stream):
                dst.copy_(src, non_blocking=True)
        slot[1].synchronize()
        second[1].synchronize()
        self._streams.give_back(slot[0])
        self._streams.give_back(second[0])
        return True

    def shutdown(self):
        while self._inflight:
            done, _ = self._inflight.pop()
            done.synchronize()
            self._events.put(done)


class ScopedStream:
    def __init__(self, pool, sync=True):
        self._pool = pool
        self._sync = sync
        self._slot = None

    def __enter__(self):
        self._slot = self._pool.borrow()  # leak: __exit__ leaves before give_back when sync is off
        if self._slot is None:
            return torch.cuda.current_stream()
        return self._slot[1]

    def __exit__(self, exc_type, exc, tb):
        if self._slot is None:
            return False
        index, stream = self._slot
        self._slot = None
        if not self._sync:
            return False
        stream.synchronize()
        self._pool.give_back(index)
        return False


@contextlib.contextmanager
def timed_region(events, sink, name):
    begin = events.get()  # clean: put in the finally
    end = events.get()  # leak: without a sink the finally only puts the other one
    begin.record()
    try:
        yield
    finally:
        end.record()
        events.put(begin)
        if sink is not None:
            sink.append((name, end.query()))
            events.put(end)


class StepMarkers:
    def __init__(self, events):
        self._events = events
        self._last = None

    def mark(self, stream):
        event = self._events.get()  # clean: near miss, the previous marker is put before it is replaced
        event.record(stream)
        if self._last is not None:
            self._events.put(self._last)
        self._last = event

    def remark(self, stream, force):
        if self._last is None or force:
            self._last = self._events.get()  # leak: with force an existing marker is overwritten
        self._last.record(stream)

    def close(self):
        if self._last is not None:
            self._events.put(self._last)
            self._last = None
