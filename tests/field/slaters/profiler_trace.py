"""Chrome-trace profiler: spans, trace files and the periodic exporter."""
from __future__ import annotations

import gzip
import json
import logging
import os
import tempfile
import time
from typing import IO, Any, Dict, List, Optional

log = logging.getLogger("prof")


class SpanTable:
    """Fixed number of open spans; ids are recycled."""

    def __init__(self, capacity: int = 64) -> None:
        self._names: List[Optional[str]] = [None] * capacity
        self._start = [0.0] * capacity
        self._unused = list(range(capacity))
        self.events: List[Dict[str, Any]] = []

    def begin_span(self, name: str) -> int:
        sid = self._unused.pop()
        self._names[sid] = name
        self._start[sid] = time.perf_counter()
        return sid

    def end_span(self, sid: int) -> None:
        dur = time.perf_counter() - self._start[sid]
        self.events.append({"name": self._names[sid], "ph": "X", "ts": self._start[sid] * 1e6, "dur": dur * 1e6})
        self._names[sid] = None
        self._unused.append(sid)

    @property
    def open_spans(self) -> int:
        return len(self._names) - len(self._unused)


class record_range:
    def __init__(self, table: SpanTable, name: str, enabled: bool = True) -> None:
        self.table = table
        self.name = name
        self.enabled = enabled
        self._sid = -1

    def __enter__(self) -> "record_range":
        if self.enabled:
            self._sid = self.table.begin_span(self.name)  # clean: near miss, exit has the same enabled guard
        return self

    def __exit__(self, *exc: object) -> None:
        if self.enabled:
            self.table.end_span(self._sid)


class step_range:
    """Per-step span; failed steps are tagged so that they can be filtered out."""

    def __init__(self, table: SpanTable, step: int, failures: List[int]) -> None:
        self.table = table
        self.step = step
        self.failures = failures

    def __enter__(self) -> int:
        self._sid = self.table.begin_span(f"step {self.step}")  # leak: exit returns early for a failed step
        return self._sid

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        if exc_type is not None:
            self.failures.append(self.step)
            return issubclass(exc_type, ArithmeticError)
        self.table.end_span(self._sid)
        return False


class TraceSink:
    def __init__(self, path: str) -> None:
        self.path = path
        self._f: Optional[IO[str]] = None
        self.rows = 0

    def start(self) -> None:
        if self._f is None:
            self._f = open(self.path, "w")  # clean: near miss, owned by the sink, closed by stop
            self._f.write("[")

    def emit(self, event: Dict[str, Any]) -> None:
        self.start()
        if self.rows:
            self._f.write(",\n")
        json.dump(event, self._f)
        self.rows += 1

    def stop(self) -> None:
        if self._f is not None:
            self._f.write("]")
            self._f.close()
            self._f = None


class RotatingSink:
    def __init__(self, stem: str, max_rows: int) -> None:
        self.stem = stem
        self.max_rows = max_rows
        self.part = 0
        self.rows = 0
        self._f = open(f"{stem}.{self.part}.jsonl", "w")  # leak: replaced on rotation, only the last file is closed

    def emit(self, event: Dict[str, Any]) -> None:
        if self.rows >= self.max_rows:
            self._rotate()
        self._f.write(json.dumps(event) + "\n")
        self.rows += 1

    def _rotate(self) -> None:
        self._f.flush()
        self.part += 1
        self.rows = 0
        self._f = open(f"{self.stem}.{self.part}.jsonl", "w")  # leak: the next rotation replaces it too

    def close(self) -> None:
        self._f.close()


def profile_step(table: SpanTable, step: int, batch: List[float], skip_nan: bool = True) -> Optional[float]:
    whole = table.begin_span("step")  # clean: ended on both ways
    fwd = table.begin_span("forward")  # clean: ended right after the forward
    loss = sum(batch) / max(1, len(batch))
    table.end_span(fwd)
    bwd = table.begin_span("backward")  # leak: a NaN loss returns before it is ended
    if skip_nan and loss != loss:
        log.warning("step %d: loss is NaN", step)
        table.end_span(whole)
        return None
    table.end_span(bwd)
    table.end_span(whole)
    return loss


def profile_layers(table: SpanTable, layers: Dict[str, float], trace_children: bool) -> float:
    total = 0.0
    sid = -1
    for name, cost in layers.items():
        if trace_children:
            sid = table.begin_span(name)  # clean: near miss, both guards are the same and nothing leaves between
        total += cost
        if trace_children:
            table.end_span(sid)
    return total


class PhaseTracker:
    """Tracks one open phase (data, forward, optimizer...) at a time."""

    def __init__(self, table: SpanTable) -> None:
        self.table = table
        self._current: Optional[int] = None

    def switch(self, name: str) -> None:
        if self._current is not None:
            self.table.end_span(self._current)
        self._current = self.table.begin_span(name)  # clean: near miss, the earlier one is ended first, the last in finish

    def finish(self) -> None:
        if self._current is not None:
            self.table.end_span(self._current)
            self._current = None


class StackTracker:
    def __init__(self, table: SpanTable) -> None:
        self.table = table
        self._stack: List[int] = []

    def push(self, name: str) -> None:
        self._stack.append(self.table.begin_span(name))  # leak: unwind cuts the list without ending the spans

    def pop(self) -> None:
        self.table.end_span(self._stack.pop())

    def unwind(self, depth: int) -> None:
        del self._stack[depth:]


def load_trace(path: str) -> List[Dict[str, Any]]:
    if path.endswith(".gz"):
        f = gzip.open(path, "rt")  # clean: one close for both branches
    else:
        f = open(path)  # clean: one close for both branches
    try:
        return json.load(f)
    finally:
        f.close()


def merge_traces(paths: List[str], out_path: str) -> int:
    out = open(out_path, "w")  # clean: closed after the loop
    count = 0
    for p in paths:
        src = open(p)  # leak: unparsable rank files are skipped without close
        try:
            events = json.load(src)
        except ValueError:
            log.warning("ignoring %s", p)
            continue
        for e in events:
            out.write(json.dumps(e) + "\n")
            count += 1
        src.close()
    out.close()
    return count


def trace_size(path: str) -> int:
    return len(open(path).read())  # leak: the handle is never bound or closed


def main() -> None:
    table = SpanTable()
    failures: List[int] = []
    with tempfile.TemporaryDirectory() as d:
        for s in range(3):
            with step_range(table, s, failures):  # clean: with
                profile_step(table, s, [1.0, 2.0])
            with record_range(table, "log", enabled=s % 2 == 0):  # clean: with
                profile_layers(table, {"attn": 1.0, "mlp": 2.0}, trace_children=True)
        ph = PhaseTracker(table)
        ph.switch("data")
        ph.switch("compute")
        ph.finish()
        st = StackTracker(table)
        st.push("outer")
        st.pop()
        path = os.path.join(d, "rank0.json")
        sink = TraceSink(path)
        for e in table.events:
            sink.emit(e)
        sink.stop()
        rot = RotatingSink(os.path.join(d, "r"), 100)  # clean: closed below
        rot.emit({"name": "x"})
        rot.close()
        print(len(load_trace(path)), merge_traces([path], os.path.join(d, "all.jsonl")), trace_size(path) > 0, table.open_spans)


if __name__ == "__main__":
    main()
