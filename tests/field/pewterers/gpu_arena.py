"""Reference-counted spans in one GPU arena, shared between model stages."""
from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional, Sequence


class Span:
    __slots__ = ("offset", "nbytes", "refs")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.refs = 1


class Arena:
    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._mem = bytearray(capacity)
        self._holes: List[List[int]] = [[0, capacity]]
        self.live = 0

    def alloc(self, nbytes: int) -> Optional[Span]:
        with self._lock:
            for hole in self._holes:
                if hole[1] >= nbytes:
                    span = Span(hole[0], nbytes)
                    hole[0] += nbytes
                    hole[1] -= nbytes
                    self.live += 1
                    return span
            return None

    def incref(self, span: Span) -> Span:
        with self._lock:
            span.refs += 1
        return span

    def decref(self, span: Span) -> None:
        with self._lock:
            span.refs -= 1
            if span.refs == 0:
                self._holes.append([span.offset, span.nbytes])
                self.live -= 1

    def bytes_of(self, span: Span) -> memoryview:
        return memoryview(self._mem)[span.offset:span.offset + span.nbytes]


class ArenaTensor:
    """Handle on a span; owns exactly one reference until close()."""

    def __init__(self, arena: Arena, span: Span) -> None:
        self._arena = arena
        self._span: Optional[Span] = arena.incref(span)  # clean: close() drops the handle's own reference

    def close(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            self._arena.decref(span)

    def __enter__(self) -> "ArenaTensor":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def tobytes(self) -> bytes:
        assert self._span is not None
        return bytes(self._arena.bytes_of(self._span))


Sink = Callable[[Span], bool]


class StageOutputs:
    """Fans the output of one stage out to the towers that consume it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._latest: Optional[Span] = None
        self._by_name: Dict[str, Span] = {}

    def publish(self, payload: bytes) -> bool:
        span = self.arena.alloc(len(payload))  # clean: near miss, replaces _latest whose reference is dropped first
        if span is None:
            return False
        self.arena.bytes_of(span)[:] = payload
        if self._latest is not None:
            self.arena.decref(self._latest)
        self._latest = span
        return True

    def publish_named(self, name: str, payload: bytes) -> bool:
        span = self.arena.alloc(len(payload))  # leak: an entry of the same name is overwritten without decref
        if span is None:
            return False
        self.arena.bytes_of(span)[:] = payload
        self._by_name[name] = span
        return True

    def retire(self, name: str) -> None:
        span = self._by_name.pop(name, None)
        if span is not None:
            self.arena.decref(span)

    def latest(self) -> Optional[Span]:
        if self._latest is None:
            return None
        return self.arena.incref(self._latest)  # clean: the caller gets the new reference

    def latest_size(self) -> int:
        span = self.latest()  # leak: the reference taken by latest() is never dropped
        return span.nbytes if span is not None else 0

    def latest_copy(self) -> bytes:
        span = self.latest()  # clean: near miss, only the None path skips the decref
        if span is None:
            return b""
        data = bytes(self.arena.bytes_of(span))
        self.arena.decref(span)
        return data

    def fan_out(self, sinks: Sequence[Sink]) -> int:
        """A sink that returns True keeps its reference and drops it itself."""
        if self._latest is None:
            return 0
        delivered = 0
        for sink in sinks:
            shared = self.arena.incref(self._latest)  # leak: a refusing sink leaves the count raised
            if not sink(shared):
                continue
            delivered += 1
        return delivered

    def offer(self, sinks: Sequence[Sink]) -> bool:
        """First sink that wants the output gets it."""
        span = self.latest()  # clean: near miss, one taker owns it, else the for-else drops it
        if span is None:
            return False
        for sink in sinks:
            if sink(span):
                break
        else:
            self.arena.decref(span)
            return False
        return True

    def close(self) -> None:
        if self._latest is not None:
            self.arena.decref(self._latest)
            self._latest = None
        for name in list(self._by_name):
            self.retire(name)


class CrossTower:
    def __init__(self, arena: Arena, outputs: StageOutputs) -> None:
        self.arena = arena
        self.outputs = outputs

    def dot(self, user: bytes, item: bytes) -> Optional[int]:
        u = self.arena.alloc(len(user))  # leak: stays when the item span cannot be had
        if u is None:
            return None
        i = self.arena.alloc(len(item))  # clean: dropped after the product
        if i is None:
            return None
        self.arena.bytes_of(u)[:] = user
        self.arena.bytes_of(i)[:] = item
        score = sum(a * b for a, b in zip(self.arena.bytes_of(u), self.arena.bytes_of(i)))
        self.arena.decref(i)
        self.arena.decref(u)
        return score

    def checksum(self) -> int:
        span = self.outputs.latest()  # clean: decref in finally after the handle took its own
        if span is None:
            return 0
        try:
            with ArenaTensor(self.arena, span) as t:  # clean: with closes the handle
                return sum(t.tobytes()) & 0xFFFF
        finally:
            self.arena.decref(span)

    def snapshot(self) -> Optional[ArenaTensor]:
        span = self.outputs.latest()  # leak: the handle takes a reference of its own, this one is never dropped
        if span is None:
            return None
        return ArenaTensor(self.arena, span)  # clean: returned handle, the caller closes it

    def log_snapshot(self, sink: Callable[[bytes], None]) -> None:
        handle = self.snapshot()  # clean: closed through with
        if handle is None:
            return
        with handle:
            sink(handle.tobytes())
