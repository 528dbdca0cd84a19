"""Append-only request journal with rotation, used to replay traffic against a new build."""
from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, TextIO


class Journal:
    def __init__(self, root: str, max_bytes: int = 1 << 20) -> None:
        self.root = Path(root)
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._fh: Optional[TextIO] = None
        self._mirror: Optional[TextIO] = None
        self._seq = 0

    def _path(self, seq: int) -> Path:
        return self.root / f"journal.{seq:05d}.jsonl"

    def _ensure(self) -> TextIO:
        if self._fh is None:
            self._fh = open(self._path(self._seq), "a")  # clean: kept in the field, rotate and close close it
        return self._fh

    def append(self, record: Dict[str, Any]) -> None:
        with self._lock:
            fh = self._ensure()
            fh.write(json.dumps(record) + "\n")
            fh.flush()
            if self._mirror is not None:
                self._mirror.write(json.dumps(record) + "\n")

    def append_nowait(self, record: Dict[str, Any]) -> bool:
        if not self._lock.acquire(blocking=False):  # clean: near miss, refused tries hold nothing and the rest is in finally
            return False
        try:
            self._ensure().write(json.dumps(record) + "\n")
            return True
        finally:
            self._lock.release()

    def rotate(self) -> bool:
        self._lock.acquire()  # leak: a journal still below the limit returns with the lock
        fh = self._ensure()
        if fh.tell() < self.max_bytes:
            return False
        fh.close()
        self._fh = None
        self._seq += 1
        self._lock.release()
        return True

    def mirror_to(self, path: str) -> None:
        """Copy further records to a second file, e.g. after a config reload."""
        with self._lock:
            self._mirror = open(path, "a")  # leak: a second call writes over the field without closing

    def close(self) -> None:
        with self._lock:
            if self._mirror is not None:
                self._mirror.close()
                self._mirror = None
            if self._fh is not None:
                self._fh.close()
                self._fh = None

    def segments(self) -> List[Path]:
        return sorted(self.root.glob("journal.*.jsonl"))


def records(path: Path) -> Iterator[Dict[str, Any]]:
    fh = open(path)  # leak: the end marker stops the generator before close
    for line in fh:
        rec = json.loads(line)
        if rec.get("kind") == "end":
            return
        yield rec
    fh.close()


def replay(journal: Journal, send: Callable[[Dict[str, Any]], None], limit: int) -> int:
    n = 0
    for path in journal.segments():
        with path.open() as fh:  # clean: with, return included
            for line in fh:
                if n >= limit:
                    return n
                send(json.loads(line))
                n += 1
    return n


def compact(journal: Journal, keep: Callable[[Dict[str, Any]], bool]) -> int:
    """Rewrite every segment with the records worth keeping."""
    dropped = 0
    for path in journal.segments():
        tmp = path.with_suffix(".tmp")
        src = open(path)  # clean: closed on both ways
        dst = open(tmp, "w")  # leak: the segment with nothing to drop is skipped with the temporary still open
        lines = src.readlines()
        src.close()
        kept = [ln for ln in lines if keep(json.loads(ln))]
        if len(kept) == len(lines):
            tmp.unlink()
            continue
        dst.writelines(kept)
        dst.close()
        os.replace(tmp, path)
        dropped += len(lines) - len(kept)
    return dropped


class SegmentTable:
    """Read handles by segment number, shared between replay workers."""

    def __init__(self, journal: Journal, max_open: int = 4) -> None:
        self.journal = journal
        self.max_open = max_open
        self.open_files: Dict[int, TextIO] = {}

    def handle(self, seq: int) -> TextIO:
        fh = self.open_files.get(seq)
        if fh is None:
            if len(self.open_files) >= self.max_open:
                _, oldest = self.open_files.popitem()
                oldest.close()
            fh = open(self.journal._path(seq))  # clean: near miss, into the table, evicted or closed by close_all
            self.open_files[seq] = fh
        return fh

    def close_all(self) -> None:
        while self.open_files:
            _, fh = self.open_files.popitem()
            fh.close()


def wait_for_segment(path: Path, attempts: int) -> Optional[str]:
    """First line of a segment that may still be empty."""
    for _ in range(attempts):
        fh = open(path)  # leak: an empty read is retried with a new handle
        line = fh.readline()
        if not line:
            time.sleep(0.001)
            continue
        fh.close()
        return line
    return None


def export(journal: Journal, out: Optional[TextIO], default: str) -> int:
    """Write all records to ``out`` or to the file named ``default``."""
    owned = out is None
    fh = open(default, "w") if owned else out  # clean: near miss, the same flag decides on close
    n = 0
    for path in journal.segments():
        text = path.read_text()
        fh.write(text)
        n += text.count("\n")
    if owned:
        fh.close()
    return n
