"""Expert-parallel token dispatch through reusable communication buffers."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Optional

try:
    import torch
except ImportError:
    torch = None


class CommBuffer:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[Any] = []

    def pack(self, rows: list[Any]) -> "CommBuffer":
        self.rows = list(rows)
        return self

    def unpack(self) -> list[Any]:
        return list(self.rows)


class BufferRack:
    """Buffers sorted by capacity; the smallest that fits is rented."""

    def __init__(self, capacities: list[int]) -> None:
        self._shelf = sorted((CommBuffer(c) for c in capacities), key=lambda b: b.capacity)

    def rent(self, capacity: int) -> Optional[CommBuffer]:
        for i, buf in enumerate(self._shelf):
            if buf.capacity >= capacity:
                return self._shelf.pop(i)
        return None

    def restock(self, buf: CommBuffer) -> None:
        buf.rows = []
        at = 0
        while at < len(self._shelf) and self._shelf[at].capacity < buf.capacity:
            at += 1
        self._shelf.insert(at, buf)


@dataclass
class DispatchHandle:
    buf: CommBuffer
    counts: list[int]
    owns: bool = True
    meta: dict[str, Any] = field(default_factory=dict)


class Dispatcher:
    def __init__(self, rack: BufferRack, num_experts: int, low_latency: bool) -> None:
        self.rack = rack
        self.num_experts = num_experts
        self.low_latency = low_latency
        self._double: Optional[CommBuffer] = None
        self._queued: list[DispatchHandle] = []

    def dispatch(self, rows: list[Any], experts: list[int], out: Optional[CommBuffer] = None) -> Optional[DispatchHandle]:
        owns = out is None
        buf = out
        if buf is None:
            buf = self.rack.rent(len(rows))  # clean: in the handle, combine() restocks an owned one
        if buf is None:
            return None
        counts = [experts.count(e) for e in range(self.num_experts)]
        return DispatchHandle(buf.pack(rows), counts, owns)

    def combine(self, handle: DispatchHandle) -> list[Any]:
        rows = handle.buf.unpack()
        if handle.owns:
            self.rack.restock(handle.buf)
            handle.owns = False
        return rows

    def forward(self, rows: list[Any], experts: list[int], run: Callable[[list[Any]], list[Any]]) -> list[Any]:
        handle = self.dispatch(rows, experts)  # clean: combine() takes the handle
        if handle is None:
            return run(rows)
        handle.buf.pack(run(handle.buf.unpack()))
        return self.combine(handle)

    def forward_skewed(self, rows: list[Any], experts: list[int], run: Callable[[list[Any]], list[Any]]) -> list[Any]:
        handle = self.dispatch(rows, experts)  # leak: one idle expert sends the rows round the handle
        if handle is None or min(handle.counts) == 0:
            return run(rows)
        handle.buf.pack(run(handle.buf.unpack()))
        return self.combine(handle)

    def permute(self, rows: list[Any], out: Optional[CommBuffer] = None) -> list[Any]:
        if out is None:
            out = self.rack.rent(len(rows))  # leak: the flag is read after out was assigned, so it is never restocked
            if out is None:
                return rows
        borrowed = out is None
        result = out.pack(rows[::-1]).unpack()
        if borrowed:
            self.rack.restock(out)
        return result

    def unpermute(self, rows: list[Any], out: Optional[CommBuffer] = None) -> list[Any]:
        mine: Optional[CommBuffer] = None
        if out is None:
            out = mine = self.rack.rent(len(rows))  # clean: near miss, restocked under the second name
            if out is None:
                return rows
        result = out.pack(rows[::-1]).unpack()
        if mine is not None:
            self.rack.restock(mine)
        return result

    def prime(self, capacity: int) -> None:
        if self.low_latency and self._double is None:
            self._double = self.rack.rent(capacity)  # clean: near miss, taken only when there is none, finish() restocks under the same flag
        self._queued.clear()

    def finish(self) -> None:
        if self.low_latency and self._double is not None:
            self.rack.restock(self._double)
            self._double = None

    def step(self, rows: list[Any]) -> list[Any]:
        buf = self.rack.rent(len(rows)) if self.low_latency else None  # leak: nothing restocks a batch of one in low latency mode
        if buf is None:
            return rows
        out = buf.pack(rows).unpack()
        if len(rows) > 1:
            self.rack.restock(buf)
        return out


class MicroBatcher:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.handles: dict[int, DispatchHandle] = {}

    def send(self, step: int, rows: list[Any], experts: list[int]) -> bool:
        handle = self.dispatcher.dispatch(rows, experts)  # leak: reset() forgets the handles not yet received
        if handle is None:
            return False
        self.handles[step] = handle
        return True

    def recv(self, step: int) -> list[Any]:
        return self.dispatcher.combine(self.handles.pop(step))

    def reset(self) -> None:
        self.handles.clear()

    def pair(self, left: list[Any], right: list[Any]) -> Optional[list[Any]]:
        a = self.dispatcher.dispatch(left, [])  # clean: combined on both ways
        if a is None:
            return None
        b = self.dispatcher.dispatch(right, [])  # clean: combined after a
        if b is None:
            self.dispatcher.combine(a)
            return None
        return self.dispatcher.combine(a) + self.dispatcher.combine(b)
