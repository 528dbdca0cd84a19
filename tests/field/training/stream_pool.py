"""CUDA stream and event pools for overlapping copies with compute."""
from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from typing import Callable, DefaultDict, List, Optional, Sequence, Set

import torch

LOG = logging.getLogger(__name__)


class EventPool:
    def __init__(self, timing: bool = False) -> None:
        self.timing = timing
        self._spare: List[torch.cuda.Event] = []
        self.live = 0

    def obtain(self) -> torch.cuda.Event:
        self.live += 1
        if self._spare:
            return self._spare.pop()
        return torch.cuda.Event(enable_timing=self.timing)

    def recycle(self, ev: torch.cuda.Event) -> None:
        self.live -= 1
        self._spare.append(ev)


class StreamPool:
    def __init__(self, n: int) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(n)]
        self._busy: Set[int] = set()

    def borrow(self) -> Optional[torch.cuda.Stream]:
        for i, s in enumerate(self._streams):
            if i not in self._busy:
                self._busy.add(i)
                return s
        return None

    def hand_back(self, stream: torch.cuda.Stream) -> None:
        self._busy.discard(self._streams.index(stream))


class OverlapEngine:
    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self.pending: DefaultDict[str, List[torch.cuda.Event]] = defaultdict(list)
        self._marker: Optional[torch.cuda.Event] = None

    def record(self, key: str) -> None:
        ev = self.events.obtain()  # clean: waits in the pending table, settle() recycles it
        ev.record()
        self.pending[key].append(ev)

    def settle(self, key: str) -> None:
        for ev in self.pending.pop(key, []):
            ev.synchronize()
            self.events.recycle(ev)

    def mark(self) -> None:
        if self._marker is not None:
            self.events.recycle(self._marker)
        self._marker = self.events.obtain()  # clean: near miss, the previous marker is recycled before the overwrite
        self._marker.record()

    def close(self) -> None:
        for key in list(self.pending):
            self.settle(key)
        if self._marker is not None:
            self.events.recycle(self._marker)
            self._marker = None

    def timed(self, fn: Callable[[], torch.Tensor]) -> float:
        begin = self.events.obtain()  # clean: recycled with its partner
        end = self.events.obtain()  # clean: recycled after the reading
        begin.record()
        fn()
        end.record()
        end.synchronize()
        ms = begin.elapsed_time(end)
        self.events.recycle(begin)
        self.events.recycle(end)
        return ms

    def timed_median(self, fn: Callable[[], torch.Tensor], reps: int) -> float:
        samples = []
        begin = self.events.obtain()  # clean: one start event for all rounds, recycled after them
        for _ in range(reps):
            end = self.events.obtain()  # leak: only the last round's end event is recycled
            begin.record()
            fn()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end))
        self.events.recycle(begin)
        self.events.recycle(end)
        return sorted(samples)[len(samples) // 2]

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        stream = self.streams.borrow()  # leak: a shape mismatch returns without handing the stream back
        if stream is None:
            dst.copy_(src)
            return True
        if dst.shape != src.shape:
            LOG.warning("shape mismatch %s vs %s", dst.shape, src.shape)
            return False
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
        stream.synchronize()
        self.streams.hand_back(stream)
        return True

    def fan_out(self, tasks: Sequence[Callable[[], None]]) -> None:
        used: List[torch.cuda.Stream] = []
        for task in tasks:
            stream = self.streams.borrow()  # clean: all borrowed streams are handed back below
            if stream is None:
                task()
                continue
            used.append(stream)
            with torch.cuda.stream(stream):
                task()
        for s in used:
            s.synchronize()
            self.streams.hand_back(s)

    def fan_out_ready(self, tasks: Sequence[Callable[[], None]]) -> int:
        used: List[torch.cuda.Stream] = []
        for task in tasks:
            stream = self.streams.borrow()  # leak: streams that are still busy at the query are never handed back
            if stream is None:
                break
            used.append(stream)
            with torch.cuda.stream(stream):
                task()
        done = [s for s in used if s.query()]
        for s in done:
            self.streams.hand_back(s)
        return len(done)

    @contextlib.contextmanager
    def side_stream(self):
        stream = self.streams.borrow()  # clean: the finally hands it back when there was one
        if stream is None:
            yield None
            return
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            stream.synchronize()
            self.streams.hand_back(stream)


def prefetch(engine: OverlapEngine, batches: Sequence[torch.Tensor], device: torch.device) -> List[torch.Tensor]:
    out = []
    for b in batches:
        with engine.side_stream():  # clean: context manager
            out.append(b.to(device, non_blocking=True))
    return out


def probe(engine: OverlapEngine) -> bool:
    free = engine.streams.borrow() is not None  # leak: borrowed only to look, never handed back
    return free


def chain(engine: OverlapEngine, stages: Sequence[Callable[[], None]]) -> None:
    prev: Optional[torch.cuda.Event] = None
    for stage in stages:
        ev = engine.events.obtain()  # clean: near miss, becomes prev and is recycled one round later
        if prev is not None:
            prev.wait()
            engine.events.recycle(prev)
        stage()
        ev.record()
        prev = ev
    if prev is not None:
        engine.events.recycle(prev)
