"""File-backed cache for tokenised prompts and image features."""
from __future__ import annotations

import io
import os
import struct
import tempfile
import threading
import zlib
from typing import BinaryIO, Dict, Iterator, List, Optional

MAGIC = b"FCACHE01"


def open_or_none(path: str) -> Optional[BinaryIO]:
    try:
        return open(path, "rb")  # clean: returned to the caller
    except FileNotFoundError:
        return None


class DiskCache:
    def __init__(self, root: str) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._index: Dict[str, int] = {}
        os.makedirs(root, exist_ok=True)

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key + ".bin")

    def write(self, key: str, blob: bytes) -> None:
        tmp = self._path(key) + ".tmp"
        out = open(tmp, "wb")  # clean: closed by the finally
        try:
            out.write(MAGIC + struct.pack("<I", zlib.crc32(blob)))
            out.write(blob)
        finally:
            out.close()
        os.replace(tmp, self._path(key))
        with self._lock:
            self._index[key] = len(blob)

    def read(self, key: str) -> Optional[bytes]:
        f = open(self._path(key), "rb")  # leak: a foreign header returns with the file open
        if f.read(len(MAGIC)) != MAGIC:
            return None
        (crc,) = struct.unpack("<I", f.read(4))
        blob = f.read()
        f.close()
        return blob if zlib.crc32(blob) == crc else None

    def peek(self, key: str, n: int = 16) -> bytes:
        with open(self._path(key), "rb") as f:  # clean: with closes it
            f.seek(len(MAGIC) + 4)
            return f.read(n)

    def raw_or_empty(self, key: str) -> bytes:
        f = open_or_none(self._path(key))  # leak: read and dropped without close
        if f is None:
            return b""
        return f.read()

    def crc_or_zero(self, key: str) -> int:
        f = open_or_none(self._path(key))  # clean: near miss, the early return has no file
        if f is None:
            return 0
        try:
            f.seek(len(MAGIC))
            return struct.unpack("<I", f.read(4))[0]
        finally:
            f.close()

    def verify(self, keys: List[str]) -> List[str]:
        bad: List[str] = []
        for key in keys:
            f = open(self._path(key), "rb")  # leak: a bad magic goes on to the next key without close
            if f.read(len(MAGIC)) != MAGIC:
                bad.append(key)
                continue
            (crc,) = struct.unpack("<I", f.read(4))
            if zlib.crc32(f.read()) != crc:
                bad.append(key)
            f.close()
        return bad

    def verify_sizes(self, keys: List[str]) -> List[str]:
        bad: List[str] = []
        for key in keys:
            f = open(self._path(key), "rb")  # clean: near miss, the finally runs on continue too
            try:
                if f.read(len(MAGIC)) != MAGIC:
                    bad.append(key)
                    continue
                if f.seek(0, io.SEEK_END) != self._index.get(key, -1) + len(MAGIC) + 4:
                    bad.append(key)
            finally:
                f.close()
        return bad

    def size_of(self, key: str) -> Optional[int]:
        self._lock.acquire()  # leak: an unknown key returns with the lock held
        if key not in self._index:
            return None
        size = self._index[key]
        self._lock.release()
        return size

    def forget(self, key: str) -> bool:
        self._lock.acquire()  # clean: released on both branches
        if key not in self._index:
            self._lock.release()
            return False
        del self._index[key]
        self._lock.release()
        return True

    def try_compact(self) -> bool:
        if not self._lock.acquire(blocking=False):  # clean: near miss, the early return is the one without the lock
            return False
        try:
            gone = [k for k in self._index if not os.path.exists(self._path(k))]
            for key in gone:
                del self._index[key]
            return True
        finally:
            self._lock.release()

    def snapshot(self) -> Dict[str, int]:
        got = self._lock.acquire(timeout=0.5)  # clean: near miss, released when it was got
        try:
            return dict(self._index)
        finally:
            if got:
                self._lock.release()

    def duplicate(self, key: str, target: str) -> bool:
        src = open(self._path(key), "rb")  # leak: an unwritable target returns with the source open
        try:
            dst = open(target, "wb")  # clean: closed below
        except OSError:
            return False
        dst.write(src.read())
        dst.close()
        src.close()
        return True

    def export(self, key: str, target: str) -> bool:
        src = open(self._path(key), "rb")  # clean: closed in the handler and at the end
        try:
            dst = open(target, "wb")  # clean: closed below
        except OSError:
            src.close()
            return False
        dst.write(src.read())
        dst.close()
        src.close()
        return True


class SegmentLog:
    def __init__(self, root: str) -> None:
        self.root = root
        self.seq = 0
        self._fh: Optional[BinaryIO] = None

    def roll(self) -> None:
        self.seq += 1
        self._fh = open(os.path.join(self.root, f"seg{self.seq}.log"), "ab")  # leak: the next roll overwrites the open segment

    def append(self, rec: bytes) -> None:
        if self._fh is None or self._fh.tell() > 1 << 20:
            self.roll()
        self._fh.write(struct.pack("<I", len(rec)) + rec)

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None


class AccessLog:
    def __init__(self, path: str) -> None:
        self.path = path
        self._fh = open(path, "a")  # clean: closed by rotate or close

    def rotate(self) -> None:
        self._fh.close()
        os.replace(self.path, self.path + ".1")
        self._fh = open(self.path, "a")  # clean: near miss, the former file was closed first

    def close(self) -> None:
        self._fh.close()

    def lines(self) -> Iterator[str]:
        with open(self.path) as f:  # clean: with closes it
            yield from f

    def raw_lines(self) -> Iterator[str]:
        f = open(self.path)  # leak: head takes a few lines and leaves the generator before its end
        for line in f:
            yield line.rstrip("\n")
        f.close()

    def head(self, n: int) -> List[str]:
        out: List[str] = []
        for line in self.raw_lines():
            if len(out) == n:
                break
            out.append(line)
        return out


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        cache = DiskCache(root)
        cache.write("a", b"payload")
        assert cache.read("a") == b"payload" and cache.peek("a") == b"payload"
        assert cache.verify(["a"]) == [] and cache.verify_sizes(["a"]) == []
        assert cache.try_compact() and cache.snapshot() == {"a": 7} and cache.forget("a")
        assert cache.crc_or_zero("a") == zlib.crc32(b"payload")
        log = AccessLog(os.path.join(root, "access.log"))  # clean: closed below
        log.rotate()
        assert list(log.lines()) == []
        log.close()


if __name__ == "__main__":
    main()
