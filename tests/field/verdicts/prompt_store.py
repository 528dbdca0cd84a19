"""Persisted prompt prefixes: segment files with reference counted readers."""
from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Iterator, Self

HEADER = struct.Struct("<4sII")


class Segment:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.readers = 0
        self.data = b""

    def load(self) -> None:
        if not self.data and self.path.exists():
            self.data = self.path.read_bytes()


class SegmentStore:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._segments: dict[str, Segment] = {}

    def open_segment(self, name: str) -> Segment:
        seg = self._segments.setdefault(name, Segment(self.root / name))
        seg.readers += 1
        seg.load()
        return seg

    def close_segment(self, seg: Segment) -> None:
        seg.readers -= 1
        if seg.readers == 0:
            seg.data = b""
            self._segments.pop(seg.path.name, None)


class PrefixReader:
    """Reader over one segment; may be switched to another with `seek_segment`."""

    def __init__(self, store: SegmentStore, name: str) -> None:
        self.store = store
        self.seg: Segment | None = store.open_segment(name)  # clean: close and seek_segment close it
        self.side: Segment | None = None
        self.closed = False

    def seek_segment(self, name: str) -> None:
        new = self.store.open_segment(name)  # clean: near miss, the current one is closed before the field changes
        if self.seg is not None:
            self.store.close_segment(self.seg)
        self.seg = new

    def attach_side(self, name: str) -> bool:
        side = self.store.open_segment(name)  # leak: an empty segment is refused while open
        if not side.data:
            return False
        self.detach_side()
        self.side = side
        return True

    def detach_side(self) -> None:
        if self.side is not None:
            self.store.close_segment(self.side)
            self.side = None

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.detach_side()
        if self.seg is not None:
            self.store.close_segment(self.seg)
            self.seg = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *a: object) -> None:
        self.close()


def read_prefix(store: SegmentStore, name: str, n: int) -> bytes:
    with PrefixReader(store, name) as r:  # clean: near miss, the return inside with closes the reader
        if r.seg is None or len(r.seg.data) < n:
            return b""
        return r.seg.data[:n]


def longest_prefix(store: SegmentStore, names: list[str], probe: bytes) -> str | None:
    best, best_len = None, 0
    for name in names:
        seg = store.open_segment(name)  # leak: continue for a mismatch leaves the segment open
        common = os.path.commonprefix([seg.data, probe])
        if len(common) <= best_len:
            continue
        best, best_len = name, len(common)
        store.close_segment(seg)
    return best


def pick_segment(store: SegmentStore, names: list[str], probe: bytes) -> Segment | None:
    best: Segment | None = None
    for name in names:
        seg = store.open_segment(name)  # clean: near miss, the one not chosen is closed in each round
        if not seg.data.startswith(probe):
            store.close_segment(seg)
        else:
            if best is not None:
                store.close_segment(best)
            best = seg
    return best


def has_prefix(store: SegmentStore, names: list[str], probe: bytes) -> bool:
    return bool(pick_segment(store, names, probe))  # leak: the segment picked is not closed


def prefix_len(store: SegmentStore, names: list[str], probe: bytes) -> int:
    if (seg := pick_segment(store, names, probe)) is None:  # clean: near miss, bound by the walrus, closed after its length was read
        return 0
    n = len(seg.data)
    store.close_segment(seg)
    return n


def iter_records(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as fh:  # clean: with in the generator
        while head := fh.read(HEADER.size):
            magic, _, size = HEADER.unpack(head)
            if magic != b"PFX1":
                return
            yield fh.read(size)


def read_raw(path: Path) -> bytes | None:
    fd = os.open(path, os.O_RDONLY)  # leak: a file too short returns None without os.close
    if os.fstat(fd).st_size < HEADER.size:
        return None
    raw = os.read(fd, os.fstat(fd).st_size)
    os.close(fd)
    return raw


def append_record(path: Path, payload: bytes, sync: bool) -> int:
    fh = open(path, "ab")  # clean: near miss, both branches fall through to the close
    fh.write(HEADER.pack(b"PFX1", int(time.time()) & 0xFFFF, len(payload)))
    fh.write(payload)
    if sync:
        fh.flush()
        os.fsync(fh.fileno())
    size = fh.tell()
    fh.close()
    return size


def copy_segment(src: Path, dst: Path) -> bool:
    a = open(src, "rb")  # clean: closed on the mismatch and at the end
    b = open(dst, "xb")  # leak: a wrong magic closes the source only
    head = a.read(HEADER.size)
    if head[:4] != b"PFX1":
        a.close()
        return False
    b.write(head + a.read())
    a.close()
    b.close()
    return True


def warm_readers(store: SegmentStore, names: list[str]) -> int:
    readers = [PrefixReader(store, n) for n in names]  # clean: near miss, the list is emptied from the end and each one closed
    total = sum(len(r.seg.data) for r in readers if r.seg)
    while readers:
        readers.pop().close()
    return total


def sizes(store: SegmentStore, names: list[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for n in names:
        r = PrefixReader(store, n)  # leak: close is only called for segments with data
        if r.seg is not None and r.seg.data:
            out[n] = len(r.seg.data)
            r.close()
    return out
