"""Token shards on disk: readers, writers and an index builder."""
from __future__ import annotations

import os
import tempfile
from typing import IO, Dict, Iterator, List, Optional


class ShardReader:
    def __init__(self, paths: List[str]) -> None:
        self.paths = paths
        self._fh: Optional[IO[bytes]] = None
        self._open: Dict[str, IO[bytes]] = {}

    def rotate(self, i: int) -> None:
        if self._fh is not None:
            self._fh.close()
        self._fh = open(self.paths[i], "rb")  # clean: near miss, the one before was closed, close() closes this one

    def handle(self, path: str) -> IO[bytes]:
        fh = self._open.get(path)
        if fh is None:
            fh = self._open[path] = open(path, "rb")  # clean: cached, close() closes all
        return fh

    def read(self, n: int) -> bytes:
        return self._fh.read(n) if self._fh is not None else b""

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None
        for fh in self._open.values():
            fh.close()
        self._open.clear()

    def forget(self, path: str) -> None:
        fh = self._open.pop(path, None)
        if fh is not None:
            fh.close()


def open_shard(path: str) -> Optional[IO[bytes]]:
    if not path.endswith(".bin"):
        return None
    return open(path, "rb")  # clean: returned


def open_valid(path: str, magic: bytes) -> Optional[IO[bytes]]:
    fh = open_shard(path)  # leak: a wrong magic returns None with the file open
    if fh is None:
        return None
    if fh.read(len(magic)) != magic:
        return None
    return fh


def count_tokens(paths: List[str]) -> int:
    total = 0
    for p in paths:
        fh = open_shard(p)  # leak: empty files continue unclosed
        if fh is None:
            continue
        data = fh.read()
        if not data:
            continue
        total += len(data)
        fh.close()
    return total


def iter_tokens(path: str) -> Iterator[int]:
    fh = open(path, "rb")  # clean: near miss, return inside try, finally closes
    try:
        while True:
            b = fh.read(1)
            if not b:
                return
            yield b[0]
    finally:
        fh.close()


def head(path: str) -> bytes:
    return open(path, "rb").read(4)  # leak: never closed


def merge(dst: str, srcs: List[str], skip_missing: bool) -> int:
    out = open(dst, "wb")  # leak: a missing source returns without closing
    n = 0
    for s in srcs:
        if not os.path.exists(s):
            if skip_missing:
                continue
            return -1
        with open(s, "rb") as fh:  # clean: with
            n += out.write(fh.read())
    out.close()
    return n


def copy_range(src: str, dst: str, n: int) -> bool:
    fin = open(src, "rb")  # leak: stays open when dst cannot be opened and the error is survived
    try:
        fout = open(dst, "wb")  # clean: closed below
    except OSError:
        return False
    fout.write(fin.read(n))
    fout.close()
    fin.close()
    return True


def copy_all(src: str, dst: str) -> bool:
    fin = open(src, "rb")  # clean: near miss, closed in the except and at the end
    try:
        fout = open(dst, "wb")  # clean: closed below
    except OSError:
        fin.close()
        return False
    fout.write(fin.read())
    fout.close()
    fin.close()
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as d:
        a, b = os.path.join(d, "a.bin"), os.path.join(d, "b.bin")
        with open(a, "wb") as f:  # clean: with
            f.write(b"abcd")
        assert copy_all(a, b) and count_tokens([a, b]) == 8
        assert list(iter_tokens(a)) == [97, 98, 99, 100]  # clean: the generator closes
        r = ShardReader([a, b])
        r.rotate(0)
        r.rotate(1)
        r.handle(a)  # clean: closed by close
        r.close()
