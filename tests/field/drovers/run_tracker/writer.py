"""Append-only metric files."""
import csv
import json
import os
import threading
from typing import Dict, IO, List, Optional


class MetricWriter:
    def __init__(self, directory: str, rotate_at: int = 1 << 20):
        self.directory = directory
        self.rotate_at = rotate_at
        self._part = 0
        self._lock = threading.Lock()
        self._fh: Optional[IO[str]] = open(self._path(), "a")  # clean: closed by close or by the rotation
        self._events: Optional[IO[str]] = None

    def _path(self) -> str:
        return os.path.join(self.directory, f"metrics.{self._part:03d}.jsonl")

    def log(self, step: int, **values: float) -> bool:
        self._lock.acquire()  # leak: a closed writer returns with the lock held
        if self._fh is None:
            return False
        self._fh.write(json.dumps({"step": step, **values}) + "\n")
        if self._fh.tell() > self.rotate_at:
            self._rotate()
        self._lock.release()
        return True

    def _rotate(self) -> None:
        assert self._fh is not None
        self._fh.close()
        self._part += 1
        self._fh = open(self._path(), "a")  # clean: near miss, the former file is closed two lines up

    def event(self, kind: str, text: str) -> None:
        if self._events is None or kind == "restart":
            self._events = open(os.path.join(self.directory, "events.log"), "a")  # leak: a restart event overwrites the open file
        self._events.write(f"{kind}\t{text}\n")

    def close(self) -> None:
        with self._lock:
            for fh in (self._fh, self._events):
                if fh is not None:
                    fh.close()
            self._fh = self._events = None


def write_csv(path: str, rows: List[Dict[str, float]], out: Optional[IO[str]] = None) -> int:
    opened = out is None
    if opened:
        out = open(path, "w", newline="")  # clean: near miss, closed under the same flag
    w = csv.writer(out)
    for row in rows:
        w.writerow(row.values())
    if opened:
        out.close()
    return len(rows)


def write_html(path: str, title: str, out: Optional[IO[str]] = None, footer: bool = True) -> None:
    opened = out is None
    fh = open(path, "w") if opened else out  # leak: closed only where a footer is written
    fh.write(f"<h1>{title}</h1>\n")
    if footer:
        fh.write("<hr>\n")
        if opened:
            fh.close()
