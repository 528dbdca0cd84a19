"""CUDA streams and events for the multi-model executor."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Callable, Sequence

import torch

log = logging.getLogger("executor")


class StreamSet:
    """Streams by priority; a stream that is out is in no list."""

    def __init__(self, high: int, low: int) -> None:
        self._by_prio: dict[int, list[torch.cuda.Stream]] = {
            -1: [torch.cuda.Stream(priority=-1) for _ in range(high)],
            0: [torch.cuda.Stream(priority=0) for _ in range(low)],
        }

    def lend(self, prio: int = 0) -> tuple[int, torch.cuda.Stream] | None:
        streams = self._by_prio[prio]
        if not streams:
            return None
        return prio, streams.pop()  # clean: handed out with its priority

    def hand_in(self, handle: tuple[int, torch.cuda.Stream]) -> None:
        prio, stream = handle
        self._by_prio[prio].append(stream)


class EventPool:
    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []

    def obtain(self) -> torch.cuda.Event:
        if self._spare:
            return self._spare.pop()  # clean: returned
        return torch.cuda.Event(enable_timing=True)

    def discard(self, event: torch.cuda.Event) -> None:
        self._spare.append(event)


@dataclass
class Launch:
    model: str
    inputs: torch.Tensor
    handle: tuple[int, torch.cuda.Stream] | None = None
    begin: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    output: torch.Tensor | None = None


@dataclass
class Executor:
    streams: StreamSet
    events: EventPool
    models: dict[str, Callable[[torch.Tensor], torch.Tensor]]
    flying: list[Launch] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def launch(self, item: Launch, urgent: bool = False) -> bool:
        if item.handle is not None:
            return False
        item.handle = self.streams.lend(-1 if urgent else 0)  # clean: held by the launch, collect hands it in
        if item.handle is None:
            return False
        item.begin = self.events.obtain()  # clean: discarded by collect
        item.end = self.events.obtain()  # clean: discarded by collect
        stream = item.handle[1]
        with torch.cuda.stream(stream):
            item.begin.record(stream)
            item.output = self.models[item.model](item.inputs)
            item.end.record(stream)
        self.flying.append(item)
        return True

    def collect(self) -> list[Launch]:
        ready = [item for item in self.flying if item.end.query()]
        for item in ready:
            self.flying.remove(item)
            self.streams.hand_in(item.handle)
            self.events.discard(item.begin)
            self.events.discard(item.end)
            item.handle = item.begin = item.end = None
        return ready

    def run_now(self, model: str, x: torch.Tensor) -> torch.Tensor | None:
        handle = self.streams.lend()  # leak: an unregistered model returns with the stream out
        if handle is None:
            return None
        fn = self.models.get(model)
        if fn is None:
            log.warning("unknown model %s", model)
            return None
        with torch.cuda.stream(handle[1]):
            out = fn(x)
        handle[1].synchronize()
        self.streams.hand_in(handle)
        return out

    def run_urgent(self, model: str, x: torch.Tensor) -> torch.Tensor | None:
        handle = self.streams.lend(-1)  # clean: near miss, None falls through to the low priority, any handle is handed in
        if handle is None:
            handle = self.streams.lend(0)  # clean: handed in after the run
        if handle is None:
            return None
        with torch.cuda.stream(handle[1]):
            out = self.models[model](x)
        handle[1].synchronize()
        self.streams.hand_in(handle)
        return out

    def time_model(self, model: str, x: torch.Tensor, rounds: int = 10) -> float:
        total = 0.0
        end = self.events.obtain()  # clean: one event for all rounds, discarded at the end
        for _ in range(rounds):
            begin = self.events.obtain()  # leak: each round rebinds begin, only the last one is discarded
            begin.record()
            self.models[model](x)
            end.record()
            end.synchronize()
            total += begin.elapsed_time(end)
        if rounds:
            self.events.discard(begin)
        self.events.discard(end)
        return total / max(rounds, 1)

    def barrier(self, streams: Sequence[torch.cuda.Stream]) -> None:
        for stream in streams:
            self.events.obtain().record(stream)  # leak: the event is dropped once recorded

    def swap_model(self, name: str, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        if not self.lock.acquire(blocking=False):  # leak: a model that is flying returns with the lock held
            return False
        if any(item.model == name for item in self.flying):
            return False
        self.models[name] = fn
        self.lock.release()
        return True
