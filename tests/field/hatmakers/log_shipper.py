"""Ships rotated log files to a collector; keeps a bounded set of open handles and a registry of read offsets."""
from __future__ import annotations

import argparse
import io
import json
import os
import socket
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import IO, Callable, Iterable, Iterator, Optional


@dataclass
class Tail:
    path: str
    handle: IO[bytes]
    offset: int = 0
    users: int = 0


class HandleCache:
    """LRU of open files. lookup() counts a user, done() takes the user away again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._tails: OrderedDict[str, Tail] = OrderedDict()

    def lookup(self, path: str) -> Tail:
        tail = self._tails.get(path)
        if tail is None:
            self._shrink()
            handle = open(path, "rb")  # clean: near miss, kept in the table, _shrink and close_all close it
            tail = self._tails[path] = Tail(path, handle)
        self._tails.move_to_end(path)
        tail.users += 1
        return tail

    def done(self, tail: Tail) -> None:
        tail.users -= 1

    def _shrink(self) -> None:
        while len(self._tails) >= self.limit:
            victim = next((t for t in self._tails.values() if t.users == 0), None)
            if victim is None:
                return
            del self._tails[victim.path]
            victim.handle.close()

    def close_all(self) -> None:
        for tail in self._tails.values():
            tail.handle.close()
        self._tails.clear()


class ArchiveCache:
    """The same for compressed archives, which are read once."""

    def __init__(self) -> None:
        self._open: dict[str, IO[bytes]] = {}

    def stream(self, path: str) -> IO[bytes]:
        if path not in self._open:
            self._open[path] = open(path, "rb")  # leak: forget() deletes the entry with the file open
        return self._open[path]

    def forget(self, path: str) -> None:
        if path in self._open:
            del self._open[path]

    def names(self) -> list[str]:
        return sorted(self._open)


@dataclass
class Offsets:
    path: str
    table: dict[str, int] = field(default_factory=dict)

    def load(self) -> None:
        if not os.path.exists(self.path):
            return
        stream = open(self.path, encoding="utf-8")  # leak: a file of an old version returns with the stream open
        first = stream.readline()
        if not first.startswith("v2"):
            self.table = {}
            return
        for line in stream:
            name, _, value = line.rpartition(" ")
            self.table[name] = int(value)
        stream.close()

    def save(self) -> None:
        temporary = self.path + ".new"
        stream = open(temporary, "w", encoding="utf-8")  # clean: closed before the rename
        stream.write("v2\n")
        for name, value in sorted(self.table.items()):
            stream.write(f"{name} {value}\n")
        stream.close()
        os.replace(temporary, self.path)


def open_source(path: str) -> IO[bytes]:
    """The caller closes."""
    raw = open(path, "rb")  # clean: handed to the caller
    return raw


def open_text(path: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_source(path), encoding="utf-8", errors="replace")  # clean: handed on, close() closes


def first_line(path: str) -> str:
    text = open_text(path)  # leak: the line is returned, the wrapper stays open
    line = text.readline()
    return line.rstrip("\n")


def head(path: str, lines: int) -> list[str]:
    with open_text(path) as text:  # clean: with closes the wrapper and the file under it
        return [line for line, _ in zip(text, range(lines))]


def merge(paths: Iterable[str], sink: Callable[[bytes], None]) -> int:
    written = 0
    for path in paths:
        source = open_source(path)  # leak: break on an empty file skips close
        data = source.read()
        if not data:
            break
        sink(data)
        written += len(data)
        source.close()
    return written


def records(path: str) -> Iterator[dict]:
    source = open_source(path)  # clean: near miss, closed in finally of the generator
    try:
        for line in source:
            if not line.strip():
                continue
            if line.startswith(b"#end"):
                return
            yield json.loads(line)
    finally:
        source.close()


class Shipper:
    def __init__(self, cache: HandleCache, offsets: Offsets, send: Callable[[bytes], bool]) -> None:
        self.cache = cache
        self.offsets = offsets
        self.send = send
        self.sent = 0
        self._spill: Optional[IO[bytes]] = None

    def ship(self, path: str, chunk: int = 65536) -> int:
        tail = self.cache.lookup(path)  # leak: an unchanged file returns 0 with the user counted
        tail.handle.seek(self.offsets.table.get(path, 0))
        data = tail.handle.read(chunk)
        if not data:
            return 0
        if self.send(data):
            tail.offset += len(data)
            self.offsets.table[path] = tail.offset
            self.sent += len(data)
        self.cache.done(tail)
        return len(data)

    def ship_all(self, paths: Iterable[str]) -> int:
        total = 0
        tails = [self.cache.lookup(path) for path in paths]  # clean: near miss, the loop below ends every one
        for tail in tails:
            data = tail.handle.read()
            if data and self.send(data):
                total += len(data)
            self.cache.done(tail)
        return total

    def spill(self, data: bytes, directory: str) -> None:
        if self._spill is None:
            self._spill = open(os.path.join(directory, "spill"), "ab")  # clean: near miss, close() closes it
        self._spill.write(data)

    def rotate_spill(self, directory: str, number: int) -> None:
        if self._spill is not None:
            self._spill.close()
        self._spill = open(os.path.join(directory, f"spill.{number}"), "ab")  # clean: old one closed, close() ends it

    def close(self) -> None:
        if self._spill is not None:
            self._spill.close()
            self._spill = None
        self.cache.close_all()


def write_pid(path: str, exclusive: bool) -> bool:
    mode = "x" if exclusive else "w"
    out = open(path, mode, encoding="ascii")  # leak: closed only for the exclusive mode
    out.write(f"{socket.gethostname()} {os.getpid()}\n")
    if exclusive:
        out.close()
        return True
    out.flush()
    return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--offsets", default="offsets")
    args = parser.parse_args()
    offsets = Offsets(args.offsets)
    offsets.load()
    shipper = Shipper(HandleCache(32), offsets, lambda data: True)
    for path in args.paths:
        shipper.ship(path)
    offsets.save()
    shipper.close()


if __name__ == "__main__":
    main()
