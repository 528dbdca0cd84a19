"""Reads sharded checkpoints: index, headers, lazily opened shards."""
from __future__ import annotations

import io
import json
import logging
import os
import struct
import tempfile
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Sequence, Tuple

logger = logging.getLogger(__name__)
MAGIC = b"SHRD"


class ShardFormatError(ValueError):
    pass


def write_shard(path: str, tensors: Dict[str, bytes]) -> None:
    header, offset = {}, 0
    for name, blob in tensors.items():
        header[name] = [offset, len(blob)]
        offset += len(blob)
    raw = json.dumps(header).encode()
    with open(path, "wb") as fh:  # clean: with
        fh.write(MAGIC + struct.pack("<I", len(raw)) + raw)
        for blob in tensors.values():
            fh.write(blob)


def read_header(path: str) -> Optional[Dict[str, List[int]]]:
    fh = open(path, "rb")  # leak: a wrong magic returns without close
    if fh.read(4) != MAGIC:
        return None
    (size,) = struct.unpack("<I", fh.read(4))
    header = json.loads(fh.read(size))
    fh.close()
    return header


def open_shard(path: str) -> BinaryIO:
    fh = open(path, "rb")  # clean: near miss, closed before the raise, else handed to the caller
    if fh.read(4) != MAGIC:
        fh.close()
        raise ShardFormatError(path)
    return fh


def shard_size(path: str) -> int:
    try:
        fh = open_shard(path)  # clean: near miss, the handled error means it was closed by open_shard
    except ShardFormatError:
        return -1
    try:
        return fh.seek(0, io.SEEK_END)
    finally:
        fh.close()


def is_complete(path: str, expected: int) -> bool:
    try:
        fh = open_shard(path)  # leak: a size that differs returns with the handle open
        size = fh.seek(0, io.SEEK_END)
        if size != expected:
            return False
        fh.close()
        return True
    except (OSError, ShardFormatError):
        return False


def find_tensor(paths: Sequence[str], name: str) -> Optional[str]:
    for path in paths:
        fh = open(path, "rb")  # leak: a short file continues with the handle open
        prefix = fh.read(8)
        if len(prefix) < 8:
            logger.warning("short shard %s", path)
            continue
        header = json.loads(fh.read(struct.unpack("<I", prefix[4:])[0]))
        fh.close()
        if name in header:
            return path
    return None


class LazyShards:
    """Keeps shards open between tensor reads."""

    def __init__(self, directory: str, max_open: int = 4) -> None:
        self.directory = directory
        self.max_open = max_open
        self._open: Dict[str, BinaryIO] = {}
        self._kept: Dict[str, BinaryIO] = {}
        self._headers: Dict[str, Dict[str, List[int]]] = {}
        self._log: Optional[Any] = None

    def __enter__(self) -> "LazyShards":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _handle(self, shard: str) -> BinaryIO:
        fh = self._kept.get(shard) or self._open.get(shard)
        if fh is None:
            if len(self._open) >= self.max_open:
                _, oldest = self._open.popitem()
                oldest.close()
            fh = open_shard(os.path.join(self.directory, shard))  # clean: kept in _open, closed on eviction and close()
            self._open[shard] = fh
        return fh

    def keep_open(self, shard: str) -> None:
        """Outside the eviction order, e.g. for the embedding shard."""
        self._kept[shard] = open_shard(os.path.join(self.directory, shard))  # leak: keeping a shard a second time overwrites the first handle unclosed

    def header(self, shard: str) -> Dict[str, List[int]]:
        if shard not in self._headers:
            fh = self._handle(shard)
            fh.seek(4)
            (size,) = struct.unpack("<I", fh.read(4))
            self._headers[shard] = json.loads(fh.read(size))
        return self._headers[shard]

    def tensor(self, shard: str, name: str) -> bytes:
        offset, length = self.header(shard)[name]
        fh = self._handle(shard)
        fh.seek(4)
        (size,) = struct.unpack("<I", fh.read(4))
        fh.seek(8 + size + offset)
        return fh.read(length)

    def log_to(self, path: str) -> None:
        if self._log is not None:
            self._log.close()
        self._log = open(path, "a")  # clean: near miss, an earlier log is closed first, close() ends it

    def close(self) -> None:
        for table in (self._open, self._kept):
            for fh in table.values():
                fh.close()
            table.clear()
        if self._log is not None:
            self._log.close()
            self._log = None


class ShardWriter:
    def __init__(self, path: str, append: bool = False) -> None:
        self.path = path
        self.fh = open(path, "ab" if append else "wb")  # clean: field, close() is the protocol
        self.written = 0

    def write(self, blob: bytes) -> None:
        self.written += self.fh.write(blob)

    def rotate(self, path: str) -> None:
        old, self.fh = self.fh, open(path, "wb")  # clean: near miss, old is closed on the next line
        old.close()
        self.path = path

    def close(self) -> None:
        self.fh.close()


class SidecarWriter:
    """Writes the blob and its index side by side."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.data: Optional[BinaryIO] = None
        self.index: Optional[Any] = None

    def begin(self) -> bool:
        if self.data is not None:
            return True
        self.data = open(self.base + ".bin", "wb")  # clean: near miss, closed in the handler when the index cannot be opened
        try:
            self.index = open(self.base + ".idx", "w")  # clean: field, end() closes both
        except OSError:
            self.data.close()
            self.data = None
            return False
        return True

    def end(self) -> None:
        if self.data is not None:
            self.data.close()
        if self.index is not None:
            self.index.close()
        self.data = self.index = None


def merge_pair(left: str, right: str, out: str) -> bool:
    a = open(left, "rb")  # leak: stays open when the second file is missing and the error is handled
    try:
        b = open(right, "rb")  # clean: closed below
    except FileNotFoundError:
        return False
    with open(out, "wb") as dst:  # clean: with
        dst.write(a.read())
        dst.write(b.read())
    a.close()
    b.close()
    return True


def copy_blob(src: str, dst: str) -> int:
    writer = ShardWriter(dst)  # clean: closed in finally
    try:
        with open(src, "rb") as fh:  # clean: near miss, the break leaves through with
            while True:
                chunk = fh.read(1 << 16)
                if not chunk:
                    break
                writer.write(chunk)
    finally:
        writer.close()
    return writer.written


def concat(parts: Sequence[str], dst: str) -> int:
    writer = ShardWriter(dst)  # leak: no parts returns 0 before close
    if not parts:
        return 0
    for part in parts:
        writer.write(open(part, "rb").read())  # leak: the handle is only an intermediate of the expression
    writer.close()
    return writer.written


def iter_lines(path: str) -> Iterator[str]:
    fh = open(path)  # clean: near miss, finally also runs when the generator is closed
    try:
        for line in fh:
            yield line.rstrip("\n")
    finally:
        fh.close()


def first_line(path: str) -> str:
    for line in iter_lines(path):  # clean: near miss, the abandoned generator is closed
        return line
    return ""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        p = os.path.join(tmp, "a.shard")
        write_shard(p, {"w": b"1234", "b": b"56"})
        with LazyShards(tmp) as shards:
            assert shards.tensor("a.shard", "b") == b"56"
        assert shard_size(p) == copy_blob(p, os.path.join(tmp, "b.shard"))
        assert "w" in (read_header(p) or {})
        side = SidecarWriter(os.path.join(tmp, "s"))
        assert side.begin()
        side.end()
