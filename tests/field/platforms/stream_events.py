"""Pools of accelerator streams and timing events, and the code that records with them."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

import torch


class EventPool:
    """Events are costly to create and are therefore reused."""

    def __init__(self, timing: bool = True) -> None:
        self.timing = timing
        self._spare: List[torch.cuda.Event] = []

    def fetch(self) -> torch.cuda.Event:
        if self._spare:
            return self._spare.pop()  # clean: returned to the caller
        return torch.cuda.Event(enable_timing=self.timing)

    def fetch_pair(self) -> Tuple[torch.cuda.Event, torch.cuda.Event]:
        start = self.fetch()  # clean: first half of the tuple returned
        end = self.fetch()  # clean: second half of the tuple returned
        return start, end

    def recycle(self, event: torch.cuda.Event) -> None:
        self._spare.append(event)


class StreamPool:
    """Round robin over side streams, each lent exclusively."""

    def __init__(self, count: int) -> None:
        self._streams: Deque[torch.cuda.Stream] = deque(torch.cuda.Stream() for _ in range(count))
        self._cond = threading.Condition()

    def lend(self, wait: bool = True) -> Optional[torch.cuda.Stream]:
        with self._cond:
            while not self._streams:
                if not wait:
                    return None
                self._cond.wait()
            return self._streams.popleft()  # clean: near miss, the loop only waits and takes nothing

    def hand_back(self, stream: torch.cuda.Stream) -> None:
        with self._cond:
            self._streams.append(stream)
            self._cond.notify()


@dataclass
class Span:
    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event


@dataclass
class KernelTimer:
    """Collects spans and resolves them at the end of a step."""

    events: EventPool
    spans: List[Span] = field(default_factory=list)
    totals: Dict[str, float] = field(default_factory=dict)
    marks: Dict[str, torch.cuda.Event] = field(default_factory=dict)

    def measure(self, name: str, fn: Callable[[], Any]) -> Any:
        start, end = self.events.fetch_pair()  # clean: near miss, both live in the span until resolve recycles them
        start.record()
        result = fn()
        end.record()
        self.spans.append(Span(name, start, end))
        return result

    def measure_now(self, fn: Callable[[], Any]) -> float:
        start, end = self.events.fetch_pair()  # leak: the start event alone is recycled
        start.record()
        fn()
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end)
        self.events.recycle(start)
        return elapsed

    def chain(self, steps: List[Callable[[], Any]]) -> None:
        """Run the steps in order and wait for the last."""
        tail: Optional[torch.cuda.Event] = None
        for step in steps:
            step()
            tail = self.events.fetch()  # leak: each turn overwrites the event of the turn before
            tail.record()
        if tail is not None:
            tail.synchronize()
            self.events.recycle(tail)

    def mark(self, name: str) -> None:
        if name in self.marks:
            self.events.recycle(self.marks.pop(name))
        event = self.events.fetch()  # clean: near miss, an earlier mark of the name is recycled first; since takes it out
        event.record()
        self.marks[name] = event

    def since(self, name: str) -> float:
        begin = self.marks.pop(name, None)
        if begin is None:
            return 0.0
        now = self.events.fetch()  # clean: recycled together with the mark
        now.record()
        now.synchronize()
        elapsed = begin.elapsed_time(now)
        self.events.recycle(begin)
        self.events.recycle(now)
        return elapsed

    def resolve(self) -> Dict[str, float]:
        for span in self.spans:
            span.end.synchronize()
            self.totals[span.name] = self.totals.get(span.name, 0.0) + span.start.elapsed_time(span.end)
            self.events.recycle(span.start)
            self.events.recycle(span.end)
        self.spans.clear()
        return self.totals


class CopyEngine:
    """Runs host/device copies on side streams."""

    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self._fences: Deque[Tuple[torch.cuda.Event, torch.cuda.Stream]] = deque()

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        stream = self.streams.lend()  # clean: near miss, queued beside its fence and handed back by reap
        fence = self.events.fetch()  # leak: reap hands back the stream and forgets the fence
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
            fence.record(stream)
        self._fences.append((fence, stream))

    def reap(self) -> int:
        count = 0
        while self._fences and self._fences[0][0].query():
            _, stream = self._fences.popleft()
            self.streams.hand_back(stream)
            count += 1
        return count

    def try_copy(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        stream = self.streams.lend(wait=False)  # leak: tensors of zero length return True with the stream lent
        if stream is None:
            return False
        if src.numel() == 0:
            return True
        with torch.cuda.stream(stream):
            dst.copy_(src)
        stream.synchronize()
        self.streams.hand_back(stream)
        return True

    def copy_list(self, pairs: List[Tuple[torch.Tensor, torch.Tensor]]) -> None:
        lent: List[torch.cuda.Stream] = []
        for dst, src in pairs:
            stream = self.streams.lend(wait=False)  # clean: near miss, the continue has none; the rest are handed back at the end
            if stream is None and not lent:
                dst.copy_(src)
                continue
            if stream is None:
                stream = lent.pop(0)
            lent.append(stream)
            with torch.cuda.stream(stream):
                dst.copy_(src, non_blocking=True)
        for stream in lent:
            stream.synchronize()
            self.streams.hand_back(stream)
