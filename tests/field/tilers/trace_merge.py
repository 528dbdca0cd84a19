"""Merges per-rank profiler traces (JSON lines, optionally gzipped)."""
from __future__ import annotations

import gzip
import heapq
import json
import logging
import os
import sys
import tempfile
from collections import OrderedDict
from contextlib import ExitStack
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, TextIO

log = logging.getLogger(__name__)

MAGIC = "#trace"


def open_trace(path: str) -> TextIO:
    if path.endswith(".gz"):
        return gzip.open(path, "rt")  # clean: returned to the caller
    return open(path, "r")  # clean: returned to the caller


def read_header(path: str) -> Optional[Dict[str, Any]]:
    fh = open_trace(path)  # leak: a file without the magic returns before the close
    first = fh.readline()
    if not first.startswith(MAGIC):
        return None
    header = json.loads(first[len(MAGIC):])
    fh.close()
    return header


def is_trace(path: str) -> bool:
    fh = open_trace(path)  # clean: closed before the answer
    first = fh.readline()
    fh.close()
    if not first:
        return False
    return first.startswith(MAGIC)


def last_step(path: str) -> int:
    step = -1
    for line in open_trace(path):  # leak: iterated without a name, nobody closes it
        if line.startswith("{"):
            step = json.loads(line).get("step", step)
    return step


def count_events(paths: Iterable[str]) -> Dict[str, int]:
    counts: Dict[str, int] = {}
    for path in paths:
        fh = open_trace(path)  # leak: an unreadable header continues with the file open
        try:
            json.loads(fh.readline()[len(MAGIC):])
        except ValueError:
            log.warning("%s: bad header, skipped", path)
            continue
        counts[path] = sum(1 for line in fh if line.startswith("{"))
        fh.close()
    return counts


def count_existing(paths: Iterable[str]) -> Dict[str, int]:
    counts: Dict[str, int] = {}
    for path in paths:
        try:
            fh = open(path)  # clean: near miss, continue is taken only when nothing was opened
        except FileNotFoundError:
            continue
        counts[path] = sum(1 for line in fh if line.startswith("{"))
        fh.close()
    return counts


def _events(fh: TextIO) -> Iterator[Dict[str, Any]]:
    for line in fh:
        if line.startswith("{"):
            yield json.loads(line)


def merge(paths: Sequence[str], out_path: str) -> int:
    readers: List[TextIO] = []
    n = 0
    try:
        for path in paths:
            readers.append(open_trace(path))  # clean: near miss, all readers closed in finally
        with open(out_path, "w") as out:  # clean: with block
            for ev in heapq.merge(*map(_events, readers), key=lambda e: e["ts"]):
                out.write(json.dumps(ev) + "\n")
                n += 1
    finally:
        for fh in readers:
            fh.close()
    return n


def merge_aligned(paths: Sequence[str], out_path: str) -> int:
    readers = [open_trace(p) for p in paths]  # leak: readers of a length mismatch are never closed
    heads = [fh.readline() for fh in readers]
    if len(set(heads)) > 1:
        log.error("ranks disagree on the header")
        return 0
    out = open(out_path, "w")  # clean: closed at the end
    n = 0
    for rows in zip(*readers):
        out.writelines(rows)
        n += 1
    out.close()
    for fh in readers:
        fh.close()
    return n


def merge_stacked(paths: Sequence[str]) -> List[float]:
    with ExitStack() as stack:
        files = [stack.enter_context(open_trace(p)) for p in paths]  # clean: near miss, the stack closes them
        if not files:
            return []
        return [ev["ts"] for ev in heapq.merge(*map(_events, files), key=lambda e: e["ts"])]


class RotatingWriter:
    def __init__(self, stem: str, limit: int) -> None:
        self.stem = stem
        self.limit = limit
        self.part = 0
        self.size = 0
        self._fh: Optional[TextIO] = None

    def write(self, line: str) -> None:
        if self._fh is None or self.size + len(line) > self.limit:
            self._fh = open(f"{self.stem}.{self.part}", "w")  # leak: rotation overwrites the open part
            self.part += 1
            self.size = 0
        self._fh.write(line)
        self.size += len(line)

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None


class DailyWriter:
    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.day: Optional[str] = None
        self._fh: Optional[TextIO] = None

    def write(self, day: str, line: str) -> None:
        if day != self.day:
            self.close()
            self._fh = open(f"{self.stem}.{day}", "a")  # clean: near miss, close() runs before the overwrite
            self.day = day
        self._fh.write(line)

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
        self._fh, self.day = None, None


class PerRankFiles:
    """One file per rank with at most ``limit`` open at a time."""

    def __init__(self, directory: str, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self._open: "OrderedDict[int, TextIO]" = OrderedDict()
        self._index: Dict[int, TextIO] = {}

    def handle(self, rank: int) -> TextIO:
        if rank not in self._open:
            if len(self._open) >= self.limit:
                self._open.popitem(last=False)
            self._open[rank] = open(os.path.join(self.directory, f"rank{rank}.jsonl"), "a")  # leak: the entry evicted by popitem is not closed
        self._open.move_to_end(rank)
        return self._open[rank]

    def index(self, rank: int) -> TextIO:
        if rank not in self._index:
            if len(self._index) >= self.limit:
                victim = next(iter(self._index))
                self._index.pop(victim).close()
            self._index[rank] = open(os.path.join(self.directory, f"rank{rank}.idx"), "a")  # clean: near miss, the evicted one is closed
        return self._index[rank]

    def close(self) -> None:
        for fh in (*self._open.values(), *self._index.values()):
            fh.close()
        self._open.clear()
        self._index.clear()


class TraceReader:
    def __init__(self, path: str) -> None:
        self.path = path
        self.steps: Optional[List[int]] = None

    def __enter__(self) -> "TraceReader":
        self._fh = open_trace(self.path)  # leak: __exit__ returns before the close when no steps were loaded
        return self

    def load(self) -> List[int]:
        self.steps = [ev.get("step", 0) for ev in _events(self._fh)]
        return self.steps

    def __exit__(self, exc_type, exc, tb) -> None:
        if self.steps is None:
            return
        log.debug("%s: %d steps", self.path, len(self.steps))
        self._fh.close()


def steps_of(path: str, dry_run: bool = False) -> List[int]:
    with TraceReader(path) as reader:  # clean: with block, the reader owns its file
        if dry_run:
            return []
        return reader.load()


def write_atomically(path: str, text: str) -> None:
    fd, tmp = tempfile.mkstemp(dir=os.path.dirname(path) or ".")  # clean: the descriptor is taken over by fdopen
    with os.fdopen(fd, "w") as fh:  # clean: with block closes the descriptor
        fh.write(text)
    os.replace(tmp, path)


def dump(events: Iterable[Dict[str, Any]], path: str) -> None:
    out = sys.stdout if path == "-" else open(path, "w")  # clean: near miss, closed unless it is stdout
    for ev in events:
        out.write(json.dumps(ev) + "\n")
    if out is not sys.stdout:
        out.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as d:
        ps = [os.path.join(d, f"r{i}.jsonl") for i in range(2)]
        for p in ps:
            write_atomically(p, MAGIC + '{"v": 1}\n{"ts": 1, "step": 3}\n{"ts": 2, "step": 4}\n')
        print(read_header(ps[0]), is_trace(ps[0]), last_step(ps[0]), list(count_events(ps).values()))
        print(merge(ps, os.path.join(d, "m")), merge_aligned(ps, os.path.join(d, "a")), merge_stacked(ps), steps_of(ps[0]))
        pf = PerRankFiles(d, 2)
        for r in range(3):
            pf.handle(r).write("x\n"), pf.index(r).write("0\n")
        pf.close()
        dw = DailyWriter(os.path.join(d, "day"))
        dw.write("mon", "a\n"), dw.write("tue", "b\n"), dw.close()
        dump([{"ts": 1}], "-"), dump([{"ts": 1}], os.path.join(d, "o")), count_existing(ps + ["nope"])
