"""Reading and writing of checkpoint shards."""
from __future__ import annotations

import json
import os
import struct
from typing import IO, Any, Iterator, Optional

MAGIC = b"QSH1"


def read_header(path: str) -> Optional[dict[str, Any]]:
    f = open(path, "rb")  # leak: bad magic returns without close
    if f.read(4) != MAGIC:
        return None
    (n,) = struct.unpack("<I", f.read(4))
    header = json.loads(f.read(n))
    f.close()
    return header


def read_tensor(path: str, offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as f:  # clean: with
        f.seek(offset)
        return f.read(nbytes)


def open_shard(path: str) -> IO[bytes]:
    f = open(path, "rb")  # clean: near miss, closed before the raise, otherwise returned
    if f.read(4) != MAGIC:
        f.close()
        raise ValueError(f"{path}: not a shard")
    return f


def first_valid(paths: list[str]) -> Optional[str]:
    for path in paths:
        try:
            f = open_shard(path)  # leak: an empty header continues past close
        except ValueError:
            continue
        size = f.read(4)
        if len(size) < 4:
            continue
        f.close()
        return path
    return None


def iter_records(path: str) -> Iterator[bytes]:
    f = open_shard(path)  # clean: finally
    try:
        while True:
            head = f.read(4)
            if len(head) < 4:
                return
            (n,) = struct.unpack("<I", head)
            yield f.read(n)
    finally:
        f.close()


class ShardWriter:
    def __init__(self, root: str, limit: int) -> None:
        self.root = root
        self.limit = limit
        self.index = 0
        self.written = 0
        self._f: Optional[IO[bytes]] = None

    def _path(self) -> str:
        return os.path.join(self.root, f"shard-{self.index:05d}.bin")

    def write(self, blob: bytes) -> None:
        if self._f is None:
            self._f = open(self._path(), "wb")  # leak: _roll replaces it without close
            self._f.write(MAGIC)
        elif self.written + len(blob) > self.limit:
            self._roll()
        self._f.write(struct.pack("<I", len(blob)) + blob)
        self.written += len(blob)

    def _roll(self) -> None:
        self.index += 1
        self.written = 0
        self._f = open(self._path(), "wb")  # leak: replaced by the next roll
        self._f.write(MAGIC)

    def close(self) -> None:
        if self._f is not None:
            self._f.close()
            self._f = None


class JournalWriter:
    def __init__(self, path: str) -> None:
        self.path = path
        self._f = open(path, "a")  # clean: rotate and close close it

    def rotate(self) -> None:
        self._f.close()
        os.replace(self.path, self.path + ".1")
        self._f = open(self.path, "a")  # clean: near miss, the previous one is closed above

    def log(self, **fields: Any) -> None:
        self._f.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        self._f.close()


class ShardCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._open: dict[str, IO[bytes]] = {}

    def get(self, path: str) -> IO[bytes]:
        f = self._open.get(path)
        if f is None:
            if len(self._open) >= self.capacity:
                self._open.pop(next(iter(self._open)))
            f = open_shard(path)  # leak: the eviction pops the handle without close
            self._open[path] = f
        return f

    def close(self) -> None:
        while self._open:
            _, f = self._open.popitem()
            f.close()


def merge(paths: list[str], out: str) -> int:
    files = [open_shard(p) for p in paths]  # clean: finally closes all
    dst = None
    total = 0
    try:
        dst = open(out, "wb")  # clean: finally
        dst.write(MAGIC)
        for f in files:
            blob = f.read()
            if not blob:
                continue
            total += dst.write(blob)
        return total
    finally:
        for f in files:
            f.close()
        if dst is not None:
            dst.close()


def same_header(a: str, b: str) -> bool:
    fa = open_shard(a)  # leak: not closed when b is refused
    try:
        fb = open_shard(b)  # clean: closed below
    except ValueError:
        return False
    same = fa.read(4) == fb.read(4)
    fa.close()
    fb.close()
    return same


def emit(blob: bytes, path: Optional[str], fallback: IO[bytes]) -> int:
    f = open(path, "wb") if path else fallback  # clean: near miss, the fallback is the caller's and stays open
    try:
        return f.write(blob)
    finally:
        if f is not fallback:
            f.close()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as d:  # clean: with
        w = ShardWriter(d, 1 << 20)
        w.write(b"abc")
        w.write(b"de")
        w.close()
        p = os.path.join(d, "shard-00000.bin")
        assert list(iter_records(p)) == [b"abc", b"de"]
        assert first_valid([p]) == p
        assert merge([p, p], os.path.join(d, "m.bin")) == 26
