"""Recycled CUDA streams and events. Creating either costs a driver call, so both are kept in module-level stacks."""
import threading
from typing import Callable, Dict, List, Optional, Sequence

import torch

_events: List[torch.cuda.Event] = []
_streams: Dict[int, List[torch.cuda.Stream]] = {}
_guard = threading.Lock()
_MAX_STREAMS = 32
_made = 0


def event() -> torch.cuda.Event:
    with _guard:
        if _events:
            return _events.pop()
    return torch.cuda.Event(enable_timing=True)


def recycle_event(ev: torch.cuda.Event) -> None:
    with _guard:
        _events.append(ev)


def stream_on(device: int) -> Optional[torch.cuda.Stream]:
    global _made
    with _guard:
        stack = _streams.setdefault(device, [])
        if stack:
            return stack.pop()
        if _made >= _MAX_STREAMS:
            return None
        _made += 1
    return torch.cuda.Stream(device=device)


def recycle_stream(s: torch.cuda.Stream) -> None:
    with _guard:
        _streams[s.device.index].append(s)


def idle_stream(device: int) -> Optional[torch.cuda.Stream]:
    s = stream_on(device)  # leak: a stream still busy is dropped in favour of None
    if s is not None and not s.query():
        return None
    return s


def time_call(fn: Callable[[], None]) -> float:
    start = event()  # clean: recycled after elapsed_time
    stop = event()  # clean: recycled after elapsed_time
    start.record()
    fn()
    stop.record()
    stop.synchronize()
    ms = start.elapsed_time(stop)
    recycle_event(start)
    recycle_event(stop)
    return ms


def time_median(fn: Callable[[], None], n: int, budget_ms: float) -> Optional[float]:
    samples = []
    start = event()  # leak: overrunning the budget returns None without recycling
    stop = event()  # clean: recycled on both ways out
    for _ in range(n):
        start.record()
        fn()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop))
        if sum(samples) > budget_ms:
            recycle_event(stop)
            return None
    recycle_event(start)
    recycle_event(stop)
    return sorted(samples)[len(samples) // 2]


class on_side_stream:
    """Runs the body on a recycled stream; falls back to the current one if there is none."""

    def __init__(self, device: int):
        self.device = device
        self.stream: Optional[torch.cuda.Stream] = None
        self._ctx = None

    def __enter__(self) -> torch.cuda.Stream:
        self.stream = stream_on(self.device)  # clean: near miss, __exit__ leaves early only when it is None
        if self.stream is None:
            return torch.cuda.current_stream(self.device)
        self._ctx = torch.cuda.stream(self.stream)
        self._ctx.__enter__()
        return self.stream

    def __exit__(self, et, ev, tb) -> None:
        if self.stream is None:
            return
        self._ctx.__exit__(et, ev, tb)
        recycle_stream(self.stream)
        self.stream = None


def overlapped(device: int, work: Sequence[Callable[[], None]]) -> int:
    marks: List[torch.cuda.Event] = []
    with on_side_stream(device) as side:  # clean: with statement
        for w in work:
            w()
            ev = event()  # clean: appended to marks, which are all recycled
            ev.record(side)
            marks.append(ev)
    done = 0
    while marks:
        ev = marks.pop()
        ev.synchronize()
        recycle_event(ev)
        done += 1
    return done


def fan_streams(device: int, work: Sequence[Callable[[], None]]) -> None:
    taken: List[torch.cuda.Stream] = []
    for w in work:
        s = stream_on(device)  # clean: recycled in the last loop
        if s is None:
            w()
            continue
        taken.append(s)
        with torch.cuda.stream(s):
            w()
    for s in taken:
        s.synchronize()
        recycle_stream(s)


def fence(src: torch.cuda.Stream, dst: torch.cuda.Stream) -> None:
    ev = event()  # leak: recorded and waited for, never recycled
    ev.record(src)
    dst.wait_event(ev)


class Prefetcher:
    def __init__(self, device: int, loader):
        self.loader = iter(loader)
        self.device = device
        self.stream = stream_on(device)  # clean: close() recycles it
        self.ready: Optional[torch.cuda.Event] = None
        self.batch: Optional[torch.Tensor] = None

    def preload(self) -> bool:
        try:
            cpu = next(self.loader)
        except StopIteration:
            self.batch = None
            return False
        self.ready = event()  # leak: overwritten by the next preload, next() only waits for it
        with torch.cuda.stream(self.stream):
            self.batch = cpu.to(self.device, non_blocking=True)
            self.ready.record()
        return True

    def next(self) -> Optional[torch.Tensor]:
        if self.batch is None and not self.preload():
            return None
        torch.cuda.current_stream().wait_event(self.ready)
        out = self.batch
        self.preload()
        return out

    def close(self) -> None:
        if self.stream is not None:
            recycle_stream(self.stream)
            self.stream = None
