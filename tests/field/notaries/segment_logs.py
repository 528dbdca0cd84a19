"""Event logs in segments: file handles owned or lent by writers, tees and exporters."""
from __future__ import annotations

import gzip
import io
import json
import os
from dataclasses import dataclass, field
from typing import IO, Iterable


class LineWriter:
    """Writes JSON lines; closes its file only if `closefd`."""

    def __init__(self, handle: IO[str], closefd: bool = True) -> None:
        self.handle = handle
        self.closefd = closefd
        self.lines = 0

    def write(self, event: dict) -> None:
        self.handle.write(json.dumps(event, sort_keys=True) + "\n")
        self.lines += 1

    def close(self) -> None:
        self.handle.flush()
        if self.closefd:
            self.handle.close()


class Tee:
    """Sends each event to several writers; `lent` ones are not closed."""

    def __init__(self, owned: list[LineWriter], lent: list[LineWriter]) -> None:
        self.owned = owned
        self.lent = lent

    def write(self, event: dict) -> None:
        for writer in (*self.owned, *self.lent):
            writer.write(event)

    def close(self) -> None:
        for writer in self.owned:
            writer.close()


def open_writer(path: str) -> LineWriter:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    handle = open(path, "a", encoding="utf-8")  # clean: near miss, closefd is true and the writer closes it
    return LineWriter(handle)


def dump_events(path: str, events: Iterable[dict]) -> int:
    handle = open(path, "w", encoding="utf-8")  # leak: the writer does not close it, nor does anyone here
    writer = LineWriter(handle, closefd=False)
    for event in events:
        writer.write(event)
    writer.close()
    return writer.lines


def dump_with_trailer(path: str, events: Iterable[dict]) -> int:
    handle = open(path, "w", encoding="utf-8")  # clean: near miss, lent to the writer and closed here
    writer = LineWriter(handle, closefd=False)
    for event in events:
        writer.write(event)
    writer.close()
    handle.write(f"# {writer.lines} events\n")
    handle.close()
    return writer.lines


def mirror(path: str, shared: LineWriter, events: Iterable[dict]) -> int:
    copy = open_writer(path)  # clean: near miss, the tee owns this one and closes it
    tee = Tee(owned=[copy], lent=[shared])
    for event in events:
        tee.write(event)
    tee.close()
    return copy.lines


def mirror_sampled(path: str, shared: LineWriter, events: Iterable[dict], every: int) -> int:
    copy = open_writer(path)  # leak: lent to a tee that closes only what it owns
    tee = Tee(owned=[], lent=[shared, copy])
    for number, event in enumerate(events):
        if number % every == 0:
            tee.write(event)
    tee.close()
    return copy.lines


@dataclass
class SegmentedLog:
    """Rolls over to a new segment after `limit` lines."""

    root: str
    limit: int
    number: int = 0
    writer: LineWriter | None = None
    sealed: list[str] = field(default_factory=list)

    def _path(self) -> str:
        return os.path.join(self.root, f"segment-{self.number:05d}.jsonl")

    def append(self, event: dict) -> None:
        if self.writer is None:
            self.writer = open_writer(self._path())  # clean: near miss, _roll() and close() both close it
        self.writer.write(event)
        if self.writer.lines >= self.limit:
            self._roll()

    def _roll(self) -> None:
        self.writer.close()
        self.writer = None
        self.sealed.append(self._path())
        self.number += 1

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class IndexedLog:
    """A log and a side index of offsets, rolled together."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.part = 0
        self._open_part()

    def _open_part(self) -> None:
        stem = os.path.join(self.root, str(self.part))
        self.data = open(stem + ".log", "ab")  # clean: near miss, roll() closes it before the next one
        self.index = open(stem + ".idx", "ab")  # leak: roll() opens the next index over this one

    def append(self, blob: bytes) -> None:
        self.index.write(self.data.tell().to_bytes(8, "little"))
        self.data.write(blob)

    def roll(self) -> None:
        self.data.close()
        self.part += 1
        self._open_part()

    def close(self) -> None:
        self.data.close()
        self.index.close()


class Exporter:
    def __init__(self, target: str, compress: bool) -> None:
        raw = open(target, "wb", buffering=0)  # clean: near miss, the buffer closes raw, gzip does not
        self.raw = raw
        self.out: IO[bytes] = gzip.GzipFile(fileobj=raw, mode="wb") if compress else io.BufferedWriter(raw)
        self.compress = compress

    def add(self, path: str) -> int:
        with open(path, "rb") as source:  # clean: closed by with
            blob = source.read()
        self.out.write(blob)
        return len(blob)

    def close(self) -> None:
        self.out.close()
        if self.compress:
            self.raw.close()
