"""Copy streams and events for weight and KV prefetch."""
from __future__ import annotations

import collections
import itertools

import torch


class StreamPool:
    def __init__(self, count):
        self._idle = [torch.cuda.Stream() for _ in range(count)]

    def get(self):
        return self._idle.pop() if self._idle else None

    def put(self, stream):
        self._idle.append(stream)


class EventPool:
    def __init__(self):
        self._idle = []

    def get(self):
        return self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)

    def put(self, event):
        self._idle.append(event)


class LayerPrefetcher:
    def __init__(self, streams, events, layers):
        self.streams = streams
        self.events = events
        self.layers = layers
        self.stream_of = {}
        self.event_of = {}

    def prefetch(self, idx):
        if idx in self.event_of:
            return
        stream = self.streams.get()  # leak: wait removes the event of the layer and forgets its stream
        if stream is None:
            return
        event = self.events.get()  # clean: near miss, one per layer until wait puts it back
        with torch.cuda.stream(stream):
            self.layers[idx].to("cuda", non_blocking=True)
            event.record(stream)
        self.stream_of[idx] = stream
        self.event_of[idx] = event

    def wait(self, idx):
        event = self.event_of.pop(idx, None)
        if event is None:
            return
        torch.cuda.current_stream().wait_event(event)
        self.events.put(event)


class CopyEngine:
    def __init__(self, streams, events):
        self.streams = streams
        self.events = events
        self.flying = collections.deque()

    def copy(self, src, dst):
        stream = self.streams.get()  # clean: queued with its event, reap puts both back
        if stream is None:
            dst.copy_(src)
            return
        event = self.events.get()  # clean: queued with its stream, reap puts both back
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
            event.record(stream)
        self.flying.append((event, stream))

    def reap(self):
        for _ in range(len(self.flying)):
            event, stream = self.flying.popleft()
            if not event.query():
                self.flying.append((event, stream))
                continue
            self.events.put(event)
            self.streams.put(stream)


class InflightWindow:
    """Limits how many kernels run ahead of the host."""

    def __init__(self, events, depth):
        self.events = events
        self.depth = depth
        self.marks = []

    def mark(self):
        event = self.events.get()  # leak: finished marks are filtered out of the list and not put back
        event.record()
        self.marks.append(event)
        self.marks = [m for m in self.marks if not m.query()]
        if len(self.marks) > self.depth:
            self.marks[0].synchronize()

    def close(self):
        for event in self.marks:
            event.synchronize()
            self.events.put(event)
        self.marks = []


class SideStreamRunner:
    def __init__(self, streams):
        self.streams = streams

    def run(self, fn, *args):
        stream = self.streams.get()  # clean: put back in the finally
        if stream is None:
            return fn(*args)
        try:
            with torch.cuda.stream(stream):
                return fn(*args)
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            self.streams.put(stream)


class StepTimer:
    def __init__(self, events):
        self.events = events
        self.ids = itertools.count()
        self.open = {}

    def start(self):
        key = next(self.ids)
        self.open[key] = self.events.get()  # clean: near miss, the counter makes every key new and stop puts it back
        self.open[key].record()
        return key

    def stop(self, key):
        begin = self.open.pop(key)
        end = self.events.get()  # clean: put back once the time is read
        end.record()
        end.synchronize()
        elapsed = begin.elapsed_time(end)
        self.events.put(begin)
        self.events.put(end)
        return elapsed


class SpanProfiler:
    def __init__(self, events):
        self.events = events
        self.stack = []
        self.spans = []

    def enter(self, name):
        event = self.events.get()  # clean: near miss, moves from the stack to the spans and report puts it back
        event.record()
        self.stack.append((name, event))

    def exit(self):
        name, begin = self.stack.pop()
        end = self.events.get()  # leak: report puts back the begin event of each span only
        end.record()
        self.spans.append((name, begin, end))

    def report(self):
        torch.cuda.synchronize()
        totals = collections.Counter()
        for name, begin, end in self.spans:
            totals[name] += begin.elapsed_time(end)
            self.events.put(begin)
        self.spans.clear()
        return totals


class WeightSwapper:
    def __init__(self, streams):
        self.streams = streams
        self.target = None
        self.stream = None

    def begin(self, model):
        self.target = model
        self.stream = self.streams.get()  # leak: a cancelled swap sets the field to None without put
        if self.stream is None:
            return False
        with torch.cuda.stream(self.stream):
            model.to("cuda", non_blocking=True)
        return True

    def commit(self):
        self.stream.synchronize()
        self.streams.put(self.stream)
        self.stream = None
        return self.target

    def cancel(self):
        self.target = None
        self.stream = None


class GraphStreams:
    def __init__(self, streams):
        self.streams = streams
        self.by_batch = {}

    def stream_for(self, batch_size):
        stream = self.by_batch.get(batch_size)
        if stream is None:
            stream = self.streams.get()  # clean: near miss, looked up first, one per batch size until close
            if stream is None:
                return torch.cuda.current_stream()
            self.by_batch[batch_size] = stream
        return stream

    def close(self):
        while self.by_batch:
            self.streams.put(self.by_batch.popitem()[1])
