"""Timing of kernels with pooled CUDA events, open ranges and activity buffers."""
from __future__ import annotations

import functools
import json
import statistics
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch


class EventPair(NamedTuple):
    start: torch.cuda.Event
    stop: torch.cuda.Event


class EventPool:
    """Events are dear to create; pairs are recycled."""

    def __init__(self, warm: int = 64):
        self._spare = [self._make() for _ in range(warm)]
        self._mu = threading.Lock()
        self.outstanding = 0

    @staticmethod
    def _make() -> EventPair:
        return EventPair(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def obtain(self) -> EventPair:
        with self._mu:
            self.outstanding += 1
            return self._spare.pop() if self._spare else self._make()

    def recycle(self, pair: EventPair) -> None:
        with self._mu:
            self.outstanding -= 1
            self._spare.append(pair)


class RangeBook:
    """Open ranges by id, as the tracing tool wants them."""

    def __init__(self, limit: int = 4096):
        self._open: dict[int, str] = {}
        self._limit = limit
        self._ids = iter(range(1 << 62))

    def start_range(self, name: str) -> int:
        if len(self._open) >= self._limit:
            return -1
        rid = next(self._ids)
        self._open[rid] = name
        return rid

    def end_range(self, rid: int) -> None:
        self._open.pop(rid, None)


events = EventPool()
ranges = RangeBook()


def timed_guarded(fn: Callable[[], object], enabled: bool) -> float | None:
    pair = events.obtain() if enabled else None  # clean: near miss, recycled under the same flag
    if enabled:
        pair.start.record()
    fn()
    if not enabled:
        return None
    pair.stop.record()
    pair.stop.synchronize()
    took = pair.start.elapsed_time(pair.stop)
    events.recycle(pair)
    return took


def bench(fn: Callable[[], object], rounds: int, cut: float) -> float:
    """Median time; stops early once a run is slower than cut."""
    times: list[float] = []
    for _ in range(rounds):
        pair = events.obtain()  # leak: the early stop breaks before the recycle
        pair.start.record()
        fn()
        pair.stop.record()
        pair.stop.synchronize()
        took = pair.start.elapsed_time(pair.stop)
        times.append(took)
        if took > cut:
            break
        events.recycle(pair)
    return statistics.median(times) if times else 0.0


def bench_trimmed(fn: Callable[[], object], rounds: int, skip: int) -> list[float]:
    pairs = []
    for _ in range(rounds + skip):
        pair = events.obtain()  # leak: the warm-up pairs are cut off the list before it is recycled
        pair.start.record()
        fn()
        pair.stop.record()
        pairs.append(pair)
    torch.cuda.synchronize()
    pairs = pairs[skip:]
    took = []
    for pair in pairs:
        took.append(pair.start.elapsed_time(pair.stop))
        events.recycle(pair)
    return took


def annotate(name: str):
    """Decorator: one range around each call."""

    def wrap(fn):
        @functools.wraps(fn)
        def inner(*args, **kwargs):
            rid = ranges.start_range(name)  # clean: near miss, ended in the finally of each call
            try:
                return fn(*args, **kwargs)
            finally:
                ranges.end_range(rid)

        return inner

    return wrap


def annotate_slow(name: str, threshold_ms: float):
    def wrap(fn):
        @functools.wraps(fn)
        def inner(*args, **kwargs):
            rid = ranges.start_range(name)  # leak: quick calls return without ending the range
            clock = events.obtain()  # clean: recycled on both ways
            clock.start.record()
            result = fn(*args, **kwargs)
            clock.stop.record()
            clock.stop.synchronize()
            took = clock.start.elapsed_time(clock.stop)
            events.recycle(clock)
            if took < threshold_ms:
                return result
            print(f"{name}: {took:.2f} ms")
            ranges.end_range(rid)
            return result

        return inner

    return wrap


class Scope:
    """with Scope('attn'): ..."""

    def __init__(self, name: str):
        self.name = name
        self.rid = -1

    def __enter__(self) -> "Scope":
        self.rid = ranges.start_range(self.name)  # clean: ended in __exit__
        return self

    def __exit__(self, *exc) -> None:
        ranges.end_range(self.rid)


class NestedTimer:
    """push() and pop() as the layers are entered and left."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, EventPair]] = []
        self.done: list[tuple[str, EventPair]] = []

    def push(self, name: str) -> None:
        pair = events.obtain()  # clean: near miss, moves from the stack to done and is recycled by report
        pair.start.record()
        self.stack.append((name, pair))

    def pop(self) -> None:
        name, pair = self.stack.pop()
        pair.stop.record()
        self.done.append((name, pair))

    def report(self) -> dict[str, float]:
        torch.cuda.synchronize()
        totals: dict[str, float] = defaultdict(float)
        while self.done:
            name, pair = self.done.pop()
            totals[name] += pair.start.elapsed_time(pair.stop)
            events.recycle(pair)
        return dict(totals)


class LayerTimer:
    """One pair per layer; the last run of each layer counts."""

    def __init__(self) -> None:
        self.pairs: dict[int, EventPair] = {}

    def before(self, layer: int) -> None:
        pair = events.obtain()  # leak: the layer's pair of the former step is overwritten
        pair.start.record()
        self.pairs[layer] = pair

    def after(self, layer: int) -> None:
        self.pairs[layer].stop.record()

    def report(self) -> dict[int, float]:
        torch.cuda.synchronize()
        out = {}
        for layer, pair in self.pairs.items():
            out[layer] = pair.start.elapsed_time(pair.stop)
            events.recycle(pair)
        self.pairs.clear()
        return out


class StepTimer:
    def __init__(self) -> None:
        self.pairs: dict[int, EventPair] = {}

    def before(self, layer: int) -> None:
        old = self.pairs.pop(layer, None)
        if old is not None:
            events.recycle(old)
        pair = events.obtain()  # clean: near miss, the old pair of the layer was recycled above
        pair.start.record()
        self.pairs[layer] = pair

    def close(self) -> None:
        for pair in self.pairs.values():
            events.recycle(pair)
        self.pairs.clear()


def run_layers(layers: list[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor, steps: int) -> dict[int, float]:
    timer = LayerTimer()
    for _ in range(steps):
        for i, layer in enumerate(layers):
            timer.before(i)
            x = layer(x)
            timer.after(i)
    return timer.report()


@dataclass
class Activity:
    kind: str
    buffer: bytearray
    filled: int = 0


class ActivityBuffers:
    """Buffers for the activity API: request_buffer gives one, complete takes it back."""

    def __init__(self, count: int, nbytes: int):
        self._empty = [Activity("", bytearray(nbytes)) for _ in range(count)]

    def request_buffer(self, kind: str) -> Activity | None:
        if not self._empty:
            return None
        act = self._empty.pop()
        act.kind, act.filled = kind, 0
        return act

    def complete(self, act: Activity) -> None:
        self._empty.append(act)


def flush_records(buffers: ActivityBuffers, records: list[dict], path: str) -> int:
    act = buffers.request_buffer("kernel")  # leak: an empty payload returns before complete
    if act is None:
        return 0
    payload = "\n".join(json.dumps(r) for r in records).encode()
    if not payload:
        return 0
    act.buffer[: len(payload)] = payload
    act.filled = len(payload)
    with open(path, "ab") as out:  # clean: closed by with
        out.write(act.buffer[: act.filled])
    written = act.filled
    buffers.complete(act)
    return written
