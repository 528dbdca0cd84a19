"""Shared memory segments of a data service: views are weak, the attach counts are not."""
from __future__ import annotations

import logging
import mmap
import threading
import weakref
from dataclasses import dataclass

log = logging.getLogger(__name__)


class View:
    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        self.name = name
        self.mapping = mapping

    def read(self, start: int, length: int) -> bytes:
        return self.mapping[start:start + length]

    def write(self, start: int, body: bytes) -> None:
        self.mapping[start:start + len(body)] = body


class Segments:
    """The mapping of a name is closed when its attach count has come down to zero."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._maps: dict[str, mmap.mmap] = {}
        self._attached: dict[str, int] = {}
        self._views: weakref.WeakValueDictionary[str, View] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def attach(self, name: str) -> View:
        with self._lock:
            if name not in self._maps:
                self._maps[name] = mmap.mmap(-1, self.size)
                self._attached[name] = 0
            self._attached[name] += 1
            view = self._views.get(name)
            if view is None:
                view = self._views[name] = View(name, self._maps[name])
            return view

    def attach_known(self, name: str) -> View | None:
        with self._lock:
            if name not in self._maps:
                return None
            return self.attach(name)  # clean: handed on to the caller

    def detach(self, name: str) -> None:
        with self._lock:
            self._attached[name] -= 1
            if self._attached[name] == 0:
                del self._attached[name]
                self._views.pop(name, None)
                self._maps.pop(name).close()


@dataclass
class Column:
    name: str
    offset: int
    length: int


class TableReader:
    def __init__(self, segments: Segments, table: str) -> None:
        self.segments = segments
        self.table = table
        self.view = segments.attach(table)  # clean: near miss, kept by the reader, close detaches

    def column(self, column: Column) -> bytes:
        return self.view.read(column.offset, column.length)

    def close(self) -> None:
        self.segments.detach(self.table)
        self.view = None


class TableWriter:
    def __init__(self, segments: Segments, table: str) -> None:
        self.segments = segments
        self.table = table
        self.view = segments.attach(table)  # leak: close() only forgets the view, the count stays

    def put(self, column: Column, body: bytes) -> None:
        self.view.write(column.offset, body[:column.length])

    def close(self) -> None:
        self.view.mapping.flush()
        self.view = None


def checksum(segments: Segments, table: str) -> int:
    view = segments.attach_known(table)  # clean: detached after the read
    if view is None:
        return 0
    value = sum(view.read(0, segments.size)) & 0xFFFFFFFF
    segments.detach(table)
    return value


def copy_column(segments: Segments, src: str, dst: str, column: Column) -> bool:
    source = segments.attach_known(src)  # leak: without the other table this one stays attached
    target = segments.attach_known(dst)  # clean: near miss, detached when only the source is missing
    if source is None:
        if target is not None:
            segments.detach(dst)
        return False
    if target is None:
        return False
    target.write(column.offset, source.read(column.offset, column.length))
    segments.detach(src)
    segments.detach(dst)
    return True


def swap_column(segments: Segments, left: str, right: str, column: Column) -> None:
    names = (left, right)
    views = [segments.attach(name) for name in names]  # clean: near miss, one detach for each name
    bodies = [view.read(column.offset, column.length) for view in views]
    for view, body in zip(views, reversed(bodies)):
        view.write(column.offset, body)
    for name in names:
        segments.detach(name)


def first_byte(segments: Segments, tables: list[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for table in tables:
        view = segments.attach_known(table)  # leak: an empty table skips the detach
        if view is None:
            continue
        head = view.read(0, 1)
        if head == b"\0":
            log.debug("%s is empty", table)
            continue
        out[table] = head[0]
        segments.detach(table)
    return out


def last_byte(segments: Segments, tables: list[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for table in tables:
        view = segments.attach_known(table)  # clean: near miss, detached before the continue
        if view is None:
            continue
        tail = view.read(segments.size - 1, 1)
        segments.detach(table)
        if tail == b"\0":
            continue
        out[table] = tail[0]
    return out
