"""Write-ahead log of the request journal: segment files, a bounded cache of open readers."""
from __future__ import annotations

import struct
import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Iterator, Optional

REC = struct.Struct("<II")


@dataclass
class Reader:
    segment: int
    fh: BinaryIO
    users: int = 0


class ReaderCache:
    """Readers in use are counted; idle ones are closed beyond `limit`."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._readers: "OrderedDict[int, Reader]" = OrderedDict()
        self._mutex = threading.Lock()

    def get(self, segment: int) -> Reader:
        with self._mutex:  # clean: with statement
            r = self._readers.get(segment)
            if r is None:
                r = Reader(segment, open(self.folder / f"{segment:08d}.wal", "rb"))  # clean: kept in _readers, _shrink and close close it
                self._readers[segment] = r
                self._shrink()
            self._readers.move_to_end(segment)
            r.users += 1
            return r

    def done(self, r: Reader) -> None:
        self._mutex.acquire()  # clean: released in the finally
        try:
            r.users -= 1
        finally:
            self._mutex.release()

    def _shrink(self) -> None:
        for seg in list(self._readers):
            if len(self._readers) <= self.limit:
                return
            if self._readers[seg].users == 0:
                self._readers.pop(seg).fh.close()

    def close(self) -> None:
        for r in self._readers.values():
            r.fh.close()
        self._readers.clear()


class Journal:
    def __init__(self, folder: Path, cache: ReaderCache) -> None:
        self.folder = folder
        self.cache = cache
        self.active = 0
        self._out: Optional[BinaryIO] = None
        self._write_lock = threading.Lock()

    def append(self, payload: bytes) -> bool:
        self._write_lock.acquire()  # leak: an oversized record returns with the lock held
        if len(payload) > 1 << 20:
            return False
        if self._out is None:
            self._out = open(self.folder / f"{self.active:08d}.wal", "ab")  # clean: the field was empty, rotate and close shut it
        self._out.write(REC.pack(len(payload), zlib.crc32(payload)) + payload)
        self._write_lock.release()
        return True

    def rotate(self) -> None:
        with self._write_lock:  # clean: with statement
            if self._out is not None:
                self._out.close()
                self._out = None
            self.active += 1

    def read_at(self, segment: int, offset: int) -> Optional[bytes]:
        r = self.cache.get(segment)  # leak: a bad checksum returns before done
        r.fh.seek(offset)
        size, crc = REC.unpack(r.fh.read(REC.size))
        payload = r.fh.read(size)
        if zlib.crc32(payload) != crc:
            return None
        self.cache.done(r)
        return payload

    def scan(self, segment: int) -> Iterator[bytes]:
        r = self.cache.get(segment)  # clean: near miss, both returns inside the loop go through the finally
        try:
            r.fh.seek(0)
            while True:
                head = r.fh.read(REC.size)
                if len(head) < REC.size:
                    return
                size, crc = REC.unpack(head)
                payload = r.fh.read(size)
                if zlib.crc32(payload) != crc:
                    return
                yield payload
        finally:
            self.cache.done(r)

    def find(self, needle: bytes, segments: list[int]) -> Optional[int]:
        for seg in segments:
            r = self.cache.get(seg)  # leak: returning the found segment leaves its reader in use
            r.fh.seek(0)
            if needle in r.fh.read():
                return seg
            self.cache.done(r)
        return None

    def sizes(self, segments: list[int]) -> dict[int, int]:
        out: dict[int, int] = {}
        for seg in segments:
            try:
                r = self.cache.get(seg)  # leak: an empty segment continues before done
            except FileNotFoundError:
                continue
            end = r.fh.seek(0, 2)
            if end == 0:
                continue
            out[seg] = end
            self.cache.done(r)
        return out

    def close(self) -> None:
        with self._write_lock:  # clean: with statement
            if self._out is not None:
                self._out.close()
                self._out = None
        self.cache.close()


def replay_into(journal: Journal, segment: int, sink) -> int:
    r = journal.cache.get(segment)  # leak: the handler for a truncated record gives up without done
    n = 0
    try:
        r.fh.seek(0)
        while head := r.fh.read(REC.size):
            size, _ = REC.unpack(head)
            sink(r.fh.read(size))
            n += 1
        journal.cache.done(r)
    except struct.error:
        return -n
    return n
