"""CUDA streams and timing events of the batch executor; both are kept and lent out."""
from __future__ import annotations

import logging
from collections import deque
from typing import Any, Callable, Deque, Optional

import torch

log = logging.getLogger("event_streams")

_events: list[torch.cuda.Event] = []
_streams: list[torch.cuda.Stream] = []


def prepare(events: int, streams: int) -> None:
    _events.extend(torch.cuda.Event(enable_timing=True) for _ in range(events))
    _streams.extend(torch.cuda.Stream() for _ in range(streams))


def lend_event() -> Optional[torch.cuda.Event]:
    return _events.pop() if _events else None


def hand_in_event(event: torch.cuda.Event) -> None:
    _events.append(event)


def lend_stream() -> Optional[torch.cuda.Stream]:
    return _streams.pop() if _streams else None


def hand_in_stream(stream: torch.cuda.Stream) -> None:
    _streams.append(stream)


def record(stream: torch.cuda.Stream) -> Optional[torch.cuda.Event]:
    """A recorded event that the caller hands in."""
    event = lend_event()  # clean: recorded and returned
    if event is not None:
        event.record(stream)
    return event


class Timeline:
    """The events of the steps of one batch."""

    def __init__(self, recent: int) -> None:
        self.marks: list[tuple[str, torch.cuda.Event]] = []
        self.recent: Deque[torch.cuda.Event] = deque(maxlen=recent)
        self.window: Deque[torch.cuda.Event] = deque()
        self.window_size = recent

    def mark(self, label: str, stream: torch.cuda.Stream) -> bool:
        event = record(stream)  # clean: near miss, report() hands in all marks
        if event is None:
            return False
        self.marks.append((label, event))
        return True

    def report(self) -> dict[str, float]:
        times: dict[str, float] = {}
        marks, self.marks = self.marks, []
        for (_, before), (label, after) in zip(marks, marks[1:]):
            after.synchronize()
            times[label] = before.elapsed_time(after)
        for _, event in marks:
            hand_in_event(event)
        return times

    def note(self, stream: torch.cuda.Stream) -> None:
        event = record(stream)  # leak: the full deque pushes out its oldest event, nobody hands it in
        if event is not None:
            self.recent.append(event)

    def slide(self, stream: torch.cuda.Stream) -> None:
        event = record(stream)  # clean: near miss, the oldest is handed in by hand, clear() hands in the others
        if event is None:
            return
        self.window.append(event)
        if len(self.window) > self.window_size:
            hand_in_event(self.window.popleft())

    def clear(self) -> None:
        while self.recent:
            hand_in_event(self.recent.pop())
        while self.window:
            hand_in_event(self.window.pop())


class Executor:
    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn
        self.side: dict[int, torch.cuda.Stream] = {}
        self.elapsed = 0.0

    def timed(self, batch: Any) -> Any:
        stream = lend_stream()  # clean: handed in on both ways
        if stream is None:
            return self.fn(batch)
        start = record(stream)  # leak: kept when there is no event for the end
        with torch.cuda.stream(stream):
            out = self.fn(batch)
        stop = record(stream)  # clean: near miss, handed in where it exists
        hand_in_stream(stream)
        if start is None:
            if stop is not None:
                hand_in_event(stop)
            return out
        if stop is None:
            log.debug("no event for the end of the step")
            return out
        stop.synchronize()
        self.elapsed += start.elapsed_time(stop)
        hand_in_event(start)
        hand_in_event(stop)
        return out

    def assign_side(self, lane: int) -> bool:
        if lane in self.side:
            return True
        stream = lend_stream()  # clean: near miss, release_sides() hands in all of them
        if stream is None:
            return False
        self.side[lane] = stream
        return True

    def swap_sides(self, left: int, right: int) -> None:
        self.side[left], self.side[right] = self.side[right], self.side[left]

    def release_sides(self) -> None:
        for stream in self.side.values():
            hand_in_stream(stream)
        self.side = {}
