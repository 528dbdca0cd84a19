"""Segment files on descriptors that the broker process opens for us."""
from __future__ import annotations

import logging
import os
import struct
from collections import OrderedDict
from typing import Any, Dict, Iterator, List, Optional, Tuple

import fdbroker

log = logging.getLogger(__name__)

MAGIC = b"SEG1"
HEADER = struct.Struct("<4sIQ")


def read_header(path: str) -> Optional[Tuple[int, int]]:
    fd = fdbroker.open_raw(path)  # leak: a foreign file returns None with the descriptor open
    magic, version, length = HEADER.unpack(os.pread(fd, HEADER.size, 0))
    if magic != MAGIC:
        log.warning("%s is no segment", path)
        return None
    fdbroker.close_raw(fd)
    return version, length


def open_segment(path: str) -> int:
    """Open a segment for reading; -1 when it is no segment."""
    fd = fdbroker.open_raw(path)  # clean: closed when refused, otherwise returned
    if os.pread(fd, 4, 0) != MAGIC:
        fdbroker.close_raw(fd)
        return -1
    return fd


def segment_length(path: str) -> int:
    fd = open_segment(path)  # clean: near miss, the negative number stands for nothing held
    if fd < 0:
        return 0
    length = os.fstat(fd).st_size
    fdbroker.close_raw(fd)
    return length


def copy_segment(source: str, target: str) -> int:
    src = open_segment(source)  # leak: the handler of the second open returns without closing it
    if src < 0:
        return 0
    try:
        dst = fdbroker.open_raw(target, "w")  # clean: closed after the copy
    except FileExistsError:
        return 0
    copied = os.sendfile(dst, src, 0, os.fstat(src).st_size)
    fdbroker.close_raw(dst)
    fdbroker.close_raw(src)
    return copied


def read_records(path: str, size: int) -> Iterator[bytes]:
    fd = fdbroker.open_raw(path)  # leak: a consumer that stops early, as find_record does, never gets to the close
    offset = HEADER.size
    while True:
        record = os.pread(fd, size, offset)
        if len(record) < size:
            break
        yield record
        offset += size
    fdbroker.close_raw(fd)


def find_record(path: str, size: int, prefix: bytes) -> Optional[bytes]:
    for record in read_records(path, size):
        if record.startswith(prefix):
            return record
    return None


def newest(paths: List[str]) -> int:
    """Descriptor of the longest segment, or -1."""
    best, best_length = -1, -1
    for path in paths:
        fd = open_segment(path)  # clean: near miss, the loser of each round is closed and the last winner returned
        if fd < 0:
            continue
        length = os.fstat(fd).st_size
        if length <= best_length:
            fdbroker.close_raw(fd)
            continue
        if best >= 0:
            fdbroker.close_raw(best)
        best, best_length = fd, length
    return best


def newest_header(paths: List[str]) -> bytes:
    fd = newest(paths)  # leak: the return of a short header skips the close
    if fd < 0:
        return b""
    header = os.pread(fd, HEADER.size, 0)
    if len(header) < HEADER.size:
        return b""
    fdbroker.close_raw(fd)
    return header


class SegmentWriter:
    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._number = 0
        self._fd = -1
        self._index_fd: Optional[int] = None

    def _path(self, suffix: str) -> str:
        return os.path.join(self._directory, f"{self._number:08d}.{suffix}")

    def rotate(self) -> None:
        self._number += 1
        fresh = fdbroker.open_raw(self._path("seg"), "w")  # clean: near miss, the previous descriptor is closed before the field is set
        if self._fd >= 0:
            fdbroker.close_raw(self._fd)
        self._fd = fresh
        self._index_fd = fdbroker.open_raw(self._path("idx"), "w")  # leak: each rotation overwrites the index descriptor of the last one

    def append(self, record: bytes) -> None:
        os.write(self._fd, record)
        os.write(self._index_fd, struct.pack("<Q", len(record)))

    def close(self) -> None:
        if self._fd >= 0:
            fdbroker.close_raw(self._fd)
            self._fd = -1
        if self._index_fd is not None:
            fdbroker.close_raw(self._index_fd)
            self._index_fd = None


class SegmentCache:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._fds: "OrderedDict[str, int]" = OrderedDict()

    def get(self, path: str) -> int:
        if path in self._fds:
            self._fds.move_to_end(path)
            return self._fds[path]
        self._fds[path] = fdbroker.open_raw(path)  # clean: near miss, the trim closes what it pops and clear the rest
        while len(self._fds) > self._capacity:
            _, oldest = self._fds.popitem(last=False)
            fdbroker.close_raw(oldest)
        return self._fds[path]

    def clear(self) -> None:
        for fd in self._fds.values():
            fdbroker.close_raw(fd)
        self._fds.clear()


def load_text(path: str, loop: Any, lazy: bool) -> str:
    fd = fdbroker.open_raw(path)  # clean: near miss, the loop or the wrapping file takes it over
    if lazy:
        loop.register_raw(name=path, fd=fd)
        return ""
    with fdbroker.wrap_raw(fd) as stream:
        return stream.read()
