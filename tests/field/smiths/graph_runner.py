"""CUDA graph capture with static input/output buffers."""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None


class CaptureError(RuntimeError):
    pass


@dataclass(eq=False)
class StaticBuffer:
    role: str
    rows: int
    data: list


class StaticBuffers:
    """Address-stable buffers. A graph keeps the ones it was captured with until it is retired."""

    def __init__(self, width: int, capacity: int = 64) -> None:
        self.width = width
        self.capacity = capacity
        self._idle: Dict[Tuple[str, int], List[StaticBuffer]] = {}
        self._out: set = set()

    def checkout(self, role: str, rows: int) -> StaticBuffer:
        if len(self._out) >= self.capacity:
            raise CaptureError("static buffer budget exhausted")
        idle = self._idle.setdefault((role, rows), [])
        buf = idle.pop() if idle else StaticBuffer(role, rows, [0.0] * (rows * self.width))
        self._out.add(buf)
        return buf

    def checkin(self, buf: StaticBuffer) -> None:
        self._out.discard(buf)
        self._idle[(buf.role, buf.rows)].append(buf)

    @contextmanager
    def scoped(self, role: str, rows: int) -> Iterator[StaticBuffer]:
        buf = self.checkout(role, rows)  # clean: finally
        try:
            yield buf
        finally:
            self.checkin(buf)

    @property
    def outstanding(self) -> int:
        return len(self._out)


@dataclass
class GraphEntry:
    rows: int
    inp: StaticBuffer
    out: StaticBuffer
    mask: Optional[StaticBuffer] = None
    graph: Optional[Callable[[], None]] = None


class GraphRunner:
    def __init__(self, buffers: StaticBuffers, masked: bool = False) -> None:
        self.buffers = buffers
        self.masked = masked
        self.graphs: Dict[int, GraphEntry] = {}
        self.encoder_graphs: Dict[int, GraphEntry] = {}
        self.pad = buffers.checkout("pad", 1)  # leak: resize_pad overwrites the field

    def _record(self, entry: GraphEntry) -> Callable[[], None]:
        if entry.rows % 2 and entry.rows != 1:
            raise CaptureError(f"odd batch {entry.rows}")

        def replay() -> None:
            entry.out.data[: len(entry.inp.data)] = entry.inp.data
        return replay

    def _entry(self, rows: int) -> GraphEntry:
        inp = self.buffers.checkout("inp", rows)  # clean: moves into the entry
        out = self.buffers.checkout("out", rows)  # clean: moves into the entry
        mask = self.buffers.checkout("mask", rows) if self.masked else None  # clean: moves into the entry
        return GraphEntry(rows, inp, out, mask)

    def _retire(self, entry: GraphEntry) -> None:
        self.buffers.checkin(entry.inp)
        self.buffers.checkin(entry.out)
        if entry.mask is not None:
            self.buffers.checkin(entry.mask)
        entry.graph = None

    def capture(self, rows: int) -> Optional[GraphEntry]:
        if rows in self.graphs:
            return self.graphs[rows]
        entry = self._entry(rows)  # clean: retired when the capture fails, else owned by the table
        try:
            entry.graph = self._record(entry)
        except CaptureError:
            self._retire(entry)
            return None
        self.graphs[rows] = entry
        return entry

    def capture_encoder(self, rows: int) -> GraphEntry:
        entry = self._entry(rows)  # leak: capturing the same size again overwrites the table's entry unretired
        entry.graph = self._record(entry)
        self.encoder_graphs[rows] = entry
        return entry

    def evict(self, rows: int) -> None:
        entry = self.graphs.pop(rows, None)
        if entry is not None:
            self._retire(entry)

    def evict_encoder(self, rows: int) -> None:
        if rows in self.encoder_graphs:
            self._retire(self.encoder_graphs.pop(rows))

    def resize_pad(self, rows: int) -> None:
        if rows != self.pad.rows:
            self.pad = self.buffers.checkout("pad", rows)  # leak: a later resize overwrites it

    def probe(self, sizes: List[int]) -> List[int]:
        """Which batch sizes can be captured at all."""
        good = []
        for rows in sizes:
            inp = self.buffers.checkout("inp", rows)  # leak: the continue after a failed record skips the check-in
            out = self.buffers.checkout("out", rows)  # clean: both ways check it in
            trial = GraphEntry(rows, inp, out)
            try:
                self._record(trial)()
            except CaptureError:
                self.buffers.checkin(out)
                continue
            self.buffers.checkin(inp)
            self.buffers.checkin(out)
            good.append(rows)
        return good

    def run(self, rows: int, x: List[float], out: Optional[StaticBuffer] = None) -> List[float]:
        owned = out is None
        if owned:
            out = self.buffers.checkout("out", rows)  # clean: near miss, checked in under the same flag
        entry = self.graphs.get(rows)
        if entry is None:
            out.data[: len(x)] = x
        else:
            entry.inp.data[: len(x)] = x
            entry.graph()
            out.data[:] = entry.out.data
        result = out.data[: len(x)]
        if owned:
            self.buffers.checkin(out)
        return result

    def run_padded(self, rows: int, x: List[float]) -> List[float]:
        target = next((r for r in sorted(self.graphs) if r >= rows), None)
        stage = self.buffers.checkout("stage", target or rows)  # leak: the eager fallback returns without checking it in
        stage.data[: len(x)] = x
        if target is None:
            return self.run(rows, stage.data[: len(x)])
        result = self.run(target, stage.data)[: len(x)]
        self.buffers.checkin(stage)
        return result

    def run_masked(self, rows: int, x: List[float]) -> Optional[List[float]]:
        with self.buffers.scoped("mask", rows) as mask:  # clean: near miss, returning inside the with checks it in
            if not any(x):
                return None
            mask.data[: len(x)] = [1.0 if v else 0.0 for v in x]
            return self.run(rows, [v * m for v, m in zip(x, mask.data)])

    def shutdown(self) -> None:
        for rows in list(self.graphs):
            self.evict(rows)
        for rows in list(self.encoder_graphs):
            self.evict_encoder(rows)
        self.buffers.checkin(self.pad)


def main() -> None:
    buffers = StaticBuffers(width=4)
    runner = GraphRunner(buffers, masked=True)
    for rows in (1, 2, 3, 4):
        runner.capture(rows)
    print(runner.run(2, [1.0] * 8))
    print(runner.run_padded(2, [2.0] * 8))
    print(runner.run_masked(1, [0.0, 3.0, 0.0, 1.0]))
    runner.shutdown()
    print("outstanding:", buffers.outstanding)


if __name__ == "__main__":
    main()
