"""Spool directory of the delivery agent: plain files, rotated segments and a cache of open handles."""
from __future__ import annotations

import gzip
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO, TextIO


class HandleCache:
    """Keeps files open between uses. `use` counts a user on, `done` counts it off."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: OrderedDict[str, list] = OrderedDict()

    def use(self, path: str) -> BinaryIO:
        entry = self._open.get(path)
        if entry is None:
            self._shrink()
            entry = self._open[path] = [open(path, "ab+"), 0]  # clean: closed by _shrink or close_all
        entry[1] += 1
        self._open.move_to_end(path)
        return entry[0]

    def done(self, path: str) -> None:
        self._open[path][1] -= 1

    def _shrink(self) -> None:
        for path in list(self._open):
            if len(self._open) < self.limit:
                break
            fh, users = self._open[path]
            if users == 0:
                fh.close()
                del self._open[path]

    def close_all(self) -> None:
        for fh, _ in self._open.values():
            fh.close()
        self._open.clear()


class Segment:
    """One append-only file of a spool; rolled over when it is full."""

    def __init__(self, root: Path, number: int) -> None:
        self.path = root / f"{number:08d}.seg"
        self.number = number
        self.fh = open(self.path, "ab")  # clean: closed by seal
        self.size = 0

    def write(self, raw: bytes) -> None:
        self.fh.write(len(raw).to_bytes(4, "big") + raw)
        self.size += 4 + len(raw)

    def seal(self) -> Path:
        self.fh.flush()
        self.fh.close()
        return self.path


class Spool:
    def __init__(self, root: Path, roll_at: int = 64 << 20) -> None:
        self.root = root
        self.roll_at = roll_at
        self.current = Segment(root, 0)  # clean: near miss, sealed by roll or close
        self.sealed: list[Path] = []
        self.side: TextIO | None = None

    def append(self, message: dict) -> None:
        self.current.write(json.dumps(message).encode())
        if self.current.size >= self.roll_at:
            self.roll()

    def roll(self) -> None:
        self.sealed.append(self.current.seal())
        self.current = Segment(self.root, self.current.number + 1)  # clean: the former one is sealed above

    def jump(self, number: int) -> None:
        """Operator command: continue at a higher segment number."""
        if number <= self.current.number:
            return
        self.sealed.append(self.current.seal())
        self.current = Segment(self.root, number)  # clean: sealed by roll or close

    def journal(self, line: str) -> None:
        if self.side is None:
            self.side = open(self.root / "journal.txt", "a")  # leak: close of the spool passes it over
        self.side.write(line + "\n")

    def close(self) -> list[Path]:
        self.sealed.append(self.current.seal())
        if self.side is not None:
            self.side.flush()
            self.side = None
        return self.sealed


def load_manifest(path: Path) -> dict:
    fh = open(path)  # leak: the manifest of another version returns early
    first = fh.readline().strip()
    if first != "manifest 2":
        return {}
    entries = dict(line.rstrip("\n").split("=", 1) for line in fh if "=" in line)
    fh.close()
    return entries


def open_any(path: Path) -> BinaryIO:
    """Compressed or not; the caller closes what it gets."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # clean: handed to the caller
    return open(path, "rb")  # clean: handed to the caller


def count_lines(paths: list[Path]) -> int:
    total = 0
    for path in paths:
        fh = open_any(path)  # leak: an empty first line skips the close
        head = fh.readline()
        if not head.strip():
            continue
        total += 1 + sum(1 for _ in fh)
        fh.close()
    return total


def head_of(paths: list[Path], n: int) -> list[bytes]:
    heads = []
    for path in paths:
        fh = open_any(path)  # clean: closed in the finally, the continue included
        try:
            head = fh.read(n)
            if not head:
                continue
            heads.append(head)
        finally:
            fh.close()
    return heads


def merge_sorted(left: Path, right: Path, out: Path) -> int:
    a = open(left)  # clean: closed below
    b = open(right)  # clean: closed below
    dst = open(out, "w")  # leak: only the two inputs are closed
    n = 0
    x, y = a.readline(), b.readline()
    while x or y:
        if x and (not y or x <= y):
            dst.write(x)
            x = a.readline()
        else:
            dst.write(y)
            y = b.readline()
        n += 1
    dst.flush()
    for fh in (a, b):
        fh.close()
    return n


def tee(line: str, out: TextIO | None, path: Path) -> None:
    """Writes to the stream that was given, or opens the file for the one line."""
    own = out is None
    if own:
        out = open(path, "a")  # clean: near miss, the flag says who closes
    out.write(line + "\n")
    if own:
        out.close()


def split_by_host(messages: list[dict], root: Path) -> int:
    outs: dict[str, TextIO] = {}
    for m in messages:
        host = m["to"].rpartition("@")[2]
        if host not in outs:
            outs[host] = open(root / f"{host}.txt", "w")  # clean: all are closed at the end
        outs[host].write(json.dumps(m) + "\n")
    for fh in outs.values():
        fh.close()
    return len(outs)


class Mailboxes:
    """Deliveries into mbox files through the handle cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = HandleCache(64)

    def deliver(self, user: str, raw: bytes, quota: int) -> bool:
        path = str(self.root / user)
        fh = self.cache.use(path)  # leak: a full mailbox returns with the user counted on
        if fh.tell() + len(raw) > quota:
            return False
        fh.write(raw)
        fh.flush()
        self.cache.done(path)
        return True

    def size(self, user: str) -> int:
        path = str(self.root / user)
        fh = self.cache.use(path)  # clean: counted off by the same path
        n = fh.seek(0, os.SEEK_END)
        self.cache.done(path)
        return n

    def shutdown(self) -> None:
        self.cache.close_all()
