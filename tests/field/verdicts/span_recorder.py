"""Minimal span recorder: preallocated records, exporters opened lazily."""
from __future__ import annotations

import functools
import logging
import time
from array import array
from typing import Any, Callable, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger("telemetry")


class SpanRecord:
    __slots__ = ("name", "t0", "t1", "attrs")

    def __init__(self) -> None:
        self.name = ""
        self.t0 = self.t1 = 0.0
        self.attrs: dict[str, Any] = {}


class SpanArena:
    def __init__(self, size: int = 1024) -> None:
        self._records = [SpanRecord() for _ in range(size)]
        self._top = size
        self.dropped = 0

    def start_record(self, name: str) -> SpanRecord | None:
        if self._top == 0:
            self.dropped += 1
            return None
        self._top -= 1
        rec = self._records[self._top]
        rec.name, rec.t0 = name, time.perf_counter()
        return rec

    def end_record(self, rec: SpanRecord) -> None:
        rec.t1 = time.perf_counter()
        rec.attrs.clear()
        self._records[self._top] = rec
        self._top += 1


class Span:
    def __init__(self, arena: SpanArena, name: str) -> None:
        self._arena = arena
        self.rec = arena.start_record(name)  # clean: __exit__ ends it when there is one

    def __enter__(self) -> "Span":
        return self

    def __exit__(self, et, ev, tb) -> None:
        if self.rec is not None:
            self._arena.end_record(self.rec)
            self.rec = None


class SampledSpan:
    def __init__(self, arena: SpanArena, name: str, keep_errors: bool = True) -> None:
        self._arena = arena
        self.keep_errors = keep_errors
        self.rec = arena.start_record(name)  # leak: __exit__ returns early for exceptions when keep_errors is off

    def __enter__(self) -> SpanRecord | None:
        return self.rec

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None and not self.keep_errors:
            return False
        if self.rec is not None:
            self._arena.end_record(self.rec)
        return False


def traced(arena: SpanArena, name: str) -> Callable[[F], F]:
    def deco(fn: F) -> F:
        @functools.wraps(fn)
        def inner(*args: Any, **kw: Any) -> Any:
            rec = arena.start_record(name)  # clean: near miss, finally ends the record on every return of fn
            try:
                return fn(*args, **kw)
            finally:
                if rec is not None:
                    arena.end_record(rec)

        return inner  # type: ignore[return-value]

    return deco


def traced_slow(arena: SpanArena, name: str, threshold: float) -> Callable[[F], F]:
    def deco(fn: F) -> F:
        @functools.wraps(fn)
        def inner(*args: Any, **kw: Any) -> Any:
            rec = arena.start_record(name)  # leak: calls quicker than the threshold return without ending the record
            out = fn(*args, **kw)
            if rec is None:
                return out
            if time.perf_counter() - rec.t0 < threshold:
                return out
            logger.warning("%s was slow", name)
            arena.end_record(rec)
            return out

        return inner  # type: ignore[return-value]

    return deco


class RequestTracer:
    def __init__(self, arena: SpanArena) -> None:
        self.arena = arena
        self.open_spans: dict[str, list[SpanRecord]] = {}
        self.latency = array("d")

    def enter(self, rid: str, stage: str) -> None:
        rec = self.arena.start_record(stage)  # clean: pushed on the request's stack, leave and abandon end them
        if rec is None:
            return
        self.open_spans.setdefault(rid, []).append(rec)

    def leave(self, rid: str) -> None:
        stack = self.open_spans.get(rid)
        if not stack:
            return
        rec = stack.pop()
        self.latency.append(time.perf_counter() - rec.t0)
        self.arena.end_record(rec)

    def abandon(self, rid: str) -> None:
        for rec in self.open_spans.pop(rid, []):
            self.arena.end_record(rec)

    def mark(self, name: str, **attrs: Any) -> None:
        rec = self.arena.start_record(name)  # clean: ended at once
        if rec is not None:
            rec.attrs.update(attrs)
            self.arena.end_record(rec)

    def nested(self, outer: str, inner: str, work: Callable[[], Any]) -> Any:
        o = self.arena.start_record(outer)  # leak: not ended when the inner record is unavailable
        if o is None:
            return work()
        i = self.arena.start_record(inner)  # clean: None on the early return, ended otherwise
        if i is None:
            return work()
        result = work()
        self.arena.end_record(i)
        self.arena.end_record(o)
        return result


def dump(path: str, tracer: RequestTracer, fmt: str) -> int:
    out = open(path, "w")  # leak: unknown format is reported by a plain return
    if fmt == "csv":
        out.write("\n".join(f"{v:.6f}" for v in tracer.latency))
    elif fmt == "bin":
        out.write(tracer.latency.tobytes().hex())
    else:
        logger.error("unknown format %s", fmt)
        return -1
    out.close()
    return len(tracer.latency)


def append_line(path: str, line: str | None) -> None:
    out = open(path, "a")  # clean: near miss, both branches come to the close
    if line is None:
        out.write("\n")
    else:
        out.write(line + "\n")
    out.close()


def handle(arena: SpanArena, payload: dict[str, Any]) -> str:
    with Span(arena, "handle") as sp:  # clean: near miss, early return leaves through __exit__
        if "prompt" not in payload:
            return "bad request"
        if sp.rec is not None:
            sp.rec.attrs["len"] = len(payload["prompt"])
        return "ok"


def count_tokens(arena: SpanArena, text: str) -> int:
    sp = Span(arena, "count")  # leak: made without with and never exited
    n = len(text.split())
    if sp.rec is not None:
        sp.rec.attrs["n"] = n
    return n
