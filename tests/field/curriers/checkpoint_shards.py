"""Reads and writes sharded checkpoints and their index."""
from __future__ import annotations

import json
import os
import struct
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple

MAGIC = b"CKP1"


class ShardReader:
    """Keeps one file open per shard until close."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.files: Dict[str, BinaryIO] = {}
        self.current: Optional[BinaryIO] = None

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def shard(self, name: str) -> BinaryIO:
        f = self.files.get(name)
        if f is None:
            f = self.files[name] = open(self._path(name), "rb")  # clean: in the table, closed in close
        return f

    def close(self) -> None:
        for f in self.files.values():
            f.close()
        self.files.clear()
        if self.current is not None:
            self.current.close()
            self.current = None

    def seek_shard(self, name: str) -> None:
        """Make name the current shard."""
        self.current = open(self._path(name), "rb")  # leak: the next seek overwrites current without closing it

    def header(self, name: str) -> Optional[int]:
        f = open(self._path(name), "rb")  # leak: a wrong magic returns without close
        magic = f.read(4)
        if magic != MAGIC:
            return None
        (n,) = struct.unpack("<I", f.read(4))
        f.close()
        return n

    def verify(self, names: List[str]) -> List[str]:
        bad = []
        for name in names:
            f = open(self._path(name), "rb")  # clean: near miss, closed before the continue
            magic = f.read(4)
            f.close()
            if magic == MAGIC:
                continue
            bad.append(name)
        return bad

    def sizes(self, names: List[str]) -> Dict[str, int]:
        out = {}
        for name in names:
            f = open(self._path(name), "rb")  # leak: an empty shard continues past the close
            n = f.seek(0, os.SEEK_END)
            if n == 0:
                continue
            out[name] = n
            f.close()
        return out

    def index(self) -> dict:
        with open(self._path("index.json")) as f:  # clean: with
            return json.load(f)

    def index_or_empty(self) -> dict:
        try:
            f = open(self._path("index.json"))  # leak: broken JSON is caught and the file is not closed
            idx = json.load(f)
            f.close()
            return idx
        except (FileNotFoundError, ValueError):
            return {}

    def metadata(self) -> dict:
        try:
            f = open(self._path("meta.json"))  # clean: near miss, inner finally closes before the outer except
            try:
                return json.load(f)
            finally:
                f.close()
        except (FileNotFoundError, ValueError):
            return {}

    def records(self, name: str) -> Iterator[bytes]:
        f = open(self._path(name), "rb")  # clean: closed in the generator's finally
        try:
            f.read(8)
            while True:
                head = f.read(4)
                if len(head) < 4:
                    return
                yield f.read(struct.unpack("<I", head)[0])
        finally:
            f.close()


def write_shard(path: str, records: List[bytes]) -> int:
    f = open(path, "wb")  # clean: closed in the finally
    try:
        f.write(MAGIC + struct.pack("<I", len(records)))
        for rec in records:
            f.write(struct.pack("<I", len(rec)) + rec)
        return f.tell()
    finally:
        f.close()


def copy_shard(src: str, dst: str, overwrite: bool) -> bool:
    fin = open(src, "rb")  # leak: not closed where the destination exists and is kept
    if os.path.exists(dst) and not overwrite:
        return False
    fout = open(dst, "wb")  # clean: closed at the end
    while True:
        chunk = fin.read(1 << 16)
        if not chunk:
            break
        fout.write(chunk)
    fout.close()
    fin.close()
    return True


def open_checked(path: str) -> Optional[BinaryIO]:
    """An open shard placed after its magic, or None."""
    f = open(path, "rb")  # clean: near miss, closed on a wrong magic, else returned
    if f.read(4) != MAGIC:
        f.close()
        return None
    return f


def count_records(paths: List[str]) -> int:
    total = 0
    for path in paths:
        f = open_checked(path)  # leak: the count is read and the file is never closed
        if f is None:
            continue
        total += struct.unpack("<I", f.read(4))[0]
    return total


def read_counts(paths: List[str]) -> List[Tuple[str, int]]:
    out = []
    for path in paths:
        f = open_checked(path)  # clean: with on the returned file
        if f is None:
            continue
        with f:
            out.append((path, struct.unpack("<I", f.read(4))[0]))
    return out


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as d:
        p = os.path.join(d, "a.bin")
        write_shard(p, [b"x", b"yy"])
        r = ShardReader(d)
        print(list(r.records("a.bin")), r.verify(["a.bin"]), read_counts([p]), r.metadata(), r.shard("a.bin").name)
        r.close()
