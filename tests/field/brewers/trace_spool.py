"""Rotating request traces: writers by stream, guarded by a plain lock."""
from __future__ import annotations

import os
import tempfile
import threading
from typing import IO, Dict, List, Optional, Tuple


class SpoolLock:
    """Counts its holders so that a stuck spool can be diagnosed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.holder: Optional[str] = None

    def grab(self, who: str, timeout: float = -1) -> bool:
        if not self._lock.acquire(timeout=timeout):  # clean: handed to the caller when True
            return False
        self.holder = who
        return True

    def ungrab(self) -> None:
        self.holder = None
        self._lock.release()


class TraceSpool:
    def __init__(self, root: str, limit: int) -> None:
        self.root = root
        self.limit = limit
        self.lock = SpoolLock()
        self.files: Dict[str, IO[str]] = {}
        self.serial = 0

    def _fresh(self, stream: str) -> IO[str]:
        self.serial += 1
        return open(os.path.join(self.root, f"{stream}.{self.serial:04d}.trace"), "w")  # clean: returned to the caller

    def write(self, stream: str, line: str) -> bool:
        if not self.lock.grab("write", timeout=0.5):  # clean: ungrabbed in finally
            return False
        try:
            out = self.files.get(stream)
            if out is None:
                out = self.files[stream] = self._fresh(stream)  # clean: near miss, the table owns it, shut and rotate close
            out.write(line + "\n")
            if out.tell() > self.limit:
                self.files.pop(stream).close()
            return True
        finally:
            self.lock.ungrab()

    def rotate(self, stream: str) -> Optional[str]:
        self.lock.grab("rotate")  # leak: a stream that is not open returns None, still grabbed
        old = self.files.get(stream)
        if old is None:
            return None
        old.close()
        self.files[stream] = self._fresh(stream)  # clean: near miss, the old file is closed before the overwrite
        self.lock.ungrab()
        return old.name

    def shut(self) -> int:
        if not self.lock.grab("shut", timeout=1.0):  # clean: near miss, ungrabbed on the early return as well
            return -1
        if not self.files:
            self.lock.ungrab()
            return 0
        n = len(self.files)
        while self.files:
            _, fh = self.files.popitem()
            fh.close()
        self.lock.ungrab()
        return n

    def busy(self) -> bool:
        return not self.lock.grab("busy", timeout=0)  # leak: a free lock is grabbed by the question and stays so


class Reader:
    """Both halves of a trace: requests and replies side by side."""

    def __init__(self, left: str, right: str) -> None:
        self.paths = (left, right)
        self.pair: Optional[Tuple[IO[str], IO[str]]] = None

    def __enter__(self) -> "Reader":
        left = open(self.paths[0])  # clean: near miss, closed when the other open fails, else by __exit__
        try:
            right = open(self.paths[1])  # clean: __exit__ closes it
        except OSError:
            left.close()
            raise
        self.pair = (left, right)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.pair is None:
            return
        pair, self.pair = self.pair, None
        for fh in pair:
            fh.close()

    def rows(self) -> List[Tuple[str, str]]:
        assert self.pair is not None
        return [(a.strip(), b.strip()) for a, b in zip(*self.pair)]


def join(left: str, right: str) -> List[Tuple[str, str]]:
    try:
        with Reader(left, right) as reader:  # clean: with statement
            return reader.rows()
    except OSError:
        return []


def merge(left: str, right: str) -> Optional[List[str]]:
    a = open(left)  # leak: a missing right file is caught and None returned
    try:
        b = open(right)  # clean: closed below
    except FileNotFoundError:
        return None
    lines = sorted([*a, *b])
    b.close()
    a.close()
    return lines


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        spool = TraceSpool(root, 1000)
        spool.write("req", "a")
        spool.write("rep", "b")
        first, second = spool.rotate("req"), spool.rotate("rep")
        assert first and second
        print(join(first, second), join(first, "none"), merge(first, second), spool.shut(), spool.shut())


if __name__ == "__main__":
    main()
