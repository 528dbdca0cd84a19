"""Experiment tracker: run handles, metric files and the lock of the index."""
from __future__ import annotations

import csv
import json
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Dict, Iterable, List, Optional


@dataclass
class RunHandle:
    run_id: str
    slot: int
    tags: List[str] = field(default_factory=list)
    metrics: Dict[str, float] = field(default_factory=dict)


class Registry:
    """At most `limit` runs are open; open_run() gives a handle, seal() ends it."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self._slots = list(range(limit))
        self._runs: Dict[str, RunHandle] = {}

    def open_run(self, run_id: str) -> Optional[RunHandle]:
        if run_id in self._runs or not self._slots:
            return None
        handle = RunHandle(run_id, self._slots.pop())
        self._runs[run_id] = handle
        return handle

    def seal(self, handle: RunHandle) -> None:
        self._runs.pop(handle.run_id, None)
        self._slots.append(handle.slot)


_index_lock = threading.Lock()


def append_index(root: Path, row: dict) -> None:
    _index_lock.acquire()  # clean: released in finally
    try:
        with open(root / "index.jsonl", "a") as out:  # clean: closed by with
            out.write(json.dumps(row) + "\n")
    finally:
        _index_lock.release()


def read_index(root: Path) -> list:
    path = root / "index.jsonl"
    _index_lock.acquire()  # leak: a missing index returns with the lock taken
    if not path.exists():
        return []
    rows = []
    with open(path) as src:  # clean: closed by with
        for line in src:
            rows.append(json.loads(line))
    _index_lock.release()
    return rows


def try_compact(root: Path) -> bool:
    if not _index_lock.acquire(blocking=False):  # clean: near miss, returns when it was not taken
        return False
    path = root / "index.jsonl"
    if path.exists():
        lines = sorted(set(path.read_text().splitlines()))
        path.write_text("\n".join(lines) + "\n")
    _index_lock.release()
    return True


def find_run(root: Path, run_id: str) -> Optional[dict]:
    src = open(root / "index.jsonl")  # leak: the row that matches is returned with the file open
    for line in src:
        row = json.loads(line)
        if row.get("run_id") == run_id:
            return row
    src.close()
    return None


def last_value(path: Path, column: str) -> Optional[float]:
    with closing(open(path, newline="")) as src:  # clean: near miss, closing() closes it for every return
        value = None
        for row in csv.DictReader(src):
            if column not in row:
                return None
            value = float(row[column])
        return value


def _open_metrics(handle: RunHandle, root: Path, name: str) -> IO[str]:
    folder = root / handle.run_id
    folder.mkdir(parents=True, exist_ok=True)
    out = open(folder / f"{name}.csv", "a", newline="")  # clean: handed to the caller
    if out.tell() == 0:
        out.write("step,value,time\n")
    return out


class MetricWriter:
    """Keeps one file for each metric. close() closes them all."""

    def __init__(self, handle: RunHandle, root: Path) -> None:
        self.handle, self.root = handle, root
        self._files: Dict[str, IO[str]] = {}

    def log(self, name: str, step: int, value: float) -> None:
        out = self._files.get(name)
        if out is None:
            out = _open_metrics(self.handle, self.root, name)  # clean: near miss, close() ends it
            self._files[name] = out
        out.write(f"{step},{value},{time.time():.3f}\n")
        self.handle.metrics[name] = value

    def drop(self, name: str) -> None:
        out = self._files.pop(name, None)
        if out is not None:
            out.close()

    def close(self) -> None:
        for out in self._files.values():
            out.close()
        self._files.clear()


class RotatingWriter:
    """One file of events, a new one after every `every` lines."""

    def __init__(self, root: Path, every: int) -> None:
        self.root, self.every = root, every
        self.lines, self.part = 0, 0
        self.out: Optional[IO[str]] = None

    def emit(self, event: dict) -> None:
        if self.out is None or self.lines >= self.every:
            self.out = open(self.root / f"events.{self.part}.jsonl", "w")  # leak: full part not closed
            self.part += 1
            self.lines = 0
        self.out.write(json.dumps(event) + "\n")
        self.lines += 1

    def close(self) -> None:
        if self.out is not None:
            self.out.close()
            self.out = None


class RollingWriter:
    """As RotatingWriter, by size."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit, self.part = root, limit, 0
        self.out: Optional[IO[str]] = None

    def emit(self, event: dict) -> None:
        if self.out is not None and self.out.tell() > self.limit:
            self.close()
        if self.out is None:
            self.out = open(self.root / f"roll.{self.part}.jsonl", "w")  # clean: near miss, none is open
            self.part += 1
        self.out.write(json.dumps(event) + "\n")

    def close(self) -> None:
        if self.out is not None:
            self.out.close()
            self.out = None


def note_artifact(handle: RunHandle, root: Path, name: str, size: int) -> None:
    out = _open_metrics(handle, root, "artifacts")  # leak: written to and never closed
    out.write(f"{name},{size},{time.time():.3f}\n")
    handle.tags.append(f"artifact:{name}")


def import_run(registry: Registry, run_id: str, rows: Iterable[dict]) -> int:
    handle = registry.open_run(run_id)  # leak: a row without a metric returns before seal()
    if handle is None:
        return 0
    n = 0
    for row in rows:
        if "metric" not in row:
            return -1
        handle.metrics[row["metric"]] = row["value"]
        n += 1
    append_index(registry.root, {"run_id": run_id, "metrics": handle.metrics})
    registry.seal(handle)
    return n


def compare_runs(root: Path, run_ids: List[str], metric: str) -> dict:
    with ExitStack() as stack:
        files = {}
        for run_id in run_ids:
            path = root / run_id / f"{metric}.csv"
            if path.exists():
                files[run_id] = stack.enter_context(open(path))  # clean: near miss, the stack closes it
        return {run_id: sum(1 for _ in src) for run_id, src in files.items()}
