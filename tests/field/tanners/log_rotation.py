"""Request log with size based rotation, and the small tools around it."""
from __future__ import annotations

import gzip
import os
import shutil
import threading
import time
from typing import Any, BinaryIO, Callable, Dict, List, Optional, TextIO


class RotatingLog:
    def __init__(self, path: str, limit: int = 1 << 20, keep: int = 5) -> None:
        self.path = path
        self.limit = limit
        self.keep = keep
        self._lock = threading.Lock()
        self._fh: TextIO = open(path, "a")  # clean: near miss, every place that assigns the field closes first
        self._closed = False

    def write(self, line: str) -> None:
        with self._lock:
            if self._closed:
                return
            self._fh.write(line + "\n")
            if self._fh.tell() >= self.limit:
                self._roll()

    def try_write(self, line: str) -> bool:
        if not self._lock.acquire(blocking=False):  # leak: the closed case returns with the lock taken
            return False
        if self._closed:
            return False
        self._fh.write(line + "\n")
        self._lock.release()
        return True

    def try_flush(self) -> bool:
        got = self._lock.acquire(timeout=0.1)  # clean: near miss, released under the result's own flag
        try:
            if not got or self._closed:
                return False
            self._fh.flush()
            return True
        finally:
            if got:
                self._lock.release()

    def _roll(self) -> None:
        self._fh.close()
        for i in range(self.keep - 1, 0, -1):
            src = f"{self.path}.{i}"
            if os.path.exists(src):
                os.replace(src, f"{self.path}.{i + 1}")
        os.replace(self.path, f"{self.path}.1")
        self._fh = open(self.path, "a")  # clean: field, closed in close or at the next roll

    def size(self) -> int:
        self._lock.acquire()  # clean: finally
        try:
            return 0 if self._closed else self._fh.tell()
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._fh.close()
                self._closed = True


class DailyLog:
    """Starts a fresh file when the date changes."""

    def __init__(self, directory: str, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self.clock = clock
        self._day: Optional[str] = None
        self._fh: Optional[TextIO] = None

    def write(self, line: str) -> None:
        day = time.strftime("%Y%m%d", time.gmtime(self.clock()))
        if day != self._day:
            self._fh = open(os.path.join(self.directory, day + ".log"), "a")  # leak: yesterday's file is overwritten in the field
            self._day = day
        self._fh.write(line + "\n")

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None


class TenantLogs:
    """At most ``limit`` open files, oldest closed first."""

    def __init__(self, directory: str, limit: int = 32) -> None:
        self.directory = directory
        self.limit = limit
        self._open: Dict[str, TextIO] = {}
        self._audit: Dict[str, TextIO] = {}

    def get(self, tenant: str) -> TextIO:
        fh = self._open.pop(tenant, None)
        if fh is None:
            while len(self._open) >= self.limit:
                oldest = next(iter(self._open))
                self._open.pop(oldest).close()
            fh = open(os.path.join(self.directory, tenant), "a")  # clean: near miss, pop and re-insert keeps it in the table
        self._open[tenant] = fh
        return fh

    def audit(self, tenant: str) -> TextIO:
        if tenant not in self._audit:
            if len(self._audit) >= self.limit:
                self._audit.pop(next(iter(self._audit)))
            self._audit[tenant] = open(os.path.join(self.directory, tenant + ".audit"), "a")  # leak: the evicted entry is popped without close
        return self._audit[tenant]

    def close(self) -> None:
        for table in (self._open, self._audit):
            for fh in table.values():
                fh.close()
            table.clear()


class Tail:
    """Context object over the live file, re-opened if it was rotated away."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fh: Optional[BinaryIO] = None
        self._ino = -1

    def __enter__(self) -> "Tail":
        self._fh = open(self.path, "rb")  # clean: __exit__ closes
        self._ino = os.fstat(self._fh.fileno()).st_ino
        return self

    def poll(self) -> bytes:
        if os.stat(self.path).st_ino != self._ino:
            fresh = open(self.path, "rb")  # clean: near miss, closed old before taking its field
            self._fh.close()
            self._fh = fresh
            self._ino = os.fstat(fresh.fileno()).st_ino
        return self._fh.read()

    def __exit__(self, *exc: Any) -> None:
        self._fh.close()


class Snapshot:
    """Holds a read handle and an exclusive marker file while a report is made."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fh: Optional[TextIO] = None
        self.marker: Optional[TextIO] = None

    def __enter__(self) -> "Snapshot":
        self.fh = open(self.path)  # clean: first thing __exit__ closes
        self.marker = open(self.path + ".busy", "w")  # leak: __exit__ returns early on KeyError before the marker is closed
        return self

    def __exit__(self, et, ev, tb) -> bool:
        self.fh.close()
        if et is KeyError:
            return True
        self.marker.close()
        os.unlink(self.path + ".busy")
        return False


def compress(path: str) -> str:
    dst = path + ".gz"
    with open(path, "rb") as src:  # clean: with
        with gzip.open(dst, "wb") as out:  # clean: with
            shutil.copyfileobj(src, out)
    os.unlink(path)
    return dst


def compress_all(paths: List[str], floor: int) -> List[str]:
    done: List[str] = []
    for p in paths:
        src = open(p, "rb")  # leak: small files continue without close
        if os.fstat(src.fileno()).st_size < floor:
            continue
        out = gzip.open(p + ".gz", "wb")  # clean: closed below
        shutil.copyfileobj(src, out)
        out.close()
        src.close()
        done.append(p + ".gz")
    return done


def grep(path: str, needle: str) -> Optional[int]:
    fh = open(path)  # clean: near miss, else of the loop and the hit both close
    for n, line in enumerate(fh):
        if needle in line:
            fh.close()
            break
    else:
        fh.close()
        return None
    return n


def newest_with(paths: List[str], needle: str) -> Optional[TextIO]:
    """The first file that contains the needle, rewound, for the caller to read and close."""
    for p in paths:
        fh = open(p)  # leak: files without the needle stay open
        if needle in fh.read():
            fh.seek(0)
            return fh
    return None


def newest_nonempty(paths: List[str]) -> Optional[TextIO]:
    for p in paths:
        fh = open(p)  # clean: near miss, returned or closed in the same round
        if fh.readline():
            fh.seek(0)
            return fh
        fh.close()
    return None


def tail_report(paths: List[str]) -> int:
    fh = newest_nonempty(paths)  # clean: closed unless None
    if fh is None:
        return 0
    n = sum(1 for _ in fh)
    fh.close()
    return n


def head_report(paths: List[str], needle: str) -> str:
    fh = newest_with(paths, needle)  # leak: the line is returned and the file stays open
    return fh.readline() if fh is not None else ""
