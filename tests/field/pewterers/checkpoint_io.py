"""Sharded checkpoint files: a JSON index and raw tensor segments."""
from __future__ import annotations

import io
import json
import os
import struct
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple

MAGIC = b"CKPT"
HEADER = struct.Struct("<4sI")


class ShardHandles:
    """Keeps the handles of the shards in use; close_all() at the end of the load."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._files: Dict[str, BinaryIO] = {}

    def get(self, name: str) -> BinaryIO:
        handle = self._files.get(name)
        if handle is None:
            handle = open(os.path.join(self.directory, name), "rb")  # clean: near miss, cached and closed by close_all
            self._files[name] = handle
        return handle

    def close_all(self) -> None:
        while self._files:
            _, handle = self._files.popitem()
            handle.close()


class CheckpointWriter:
    def __init__(self, path: str, durable: bool = True) -> None:
        self.path = path
        self.durable = durable
        self._out: Optional[BinaryIO] = None
        self.index: Dict[str, Tuple[int, int]] = {}

    def __enter__(self) -> "CheckpointWriter":
        self._out = open(self.path + ".tmp", "wb")  # leak: __exit__ returns before close when nothing was written
        self._out.write(HEADER.pack(MAGIC, 1))
        return self

    def add(self, name: str, payload: bytes) -> None:
        self.index[name] = (self._out.tell(), len(payload))
        self._out.write(payload)

    def __exit__(self, exc_type, exc, tb) -> None:
        if exc_type is None and not self.index:
            os.unlink(self.path + ".tmp")
            return
        if self.durable:
            self._out.flush()
            os.fsync(self._out.fileno())
        self._out.close()
        if exc_type is None:
            os.replace(self.path + ".tmp", self.path)


def write_shard(path: str, tensors: Dict[str, bytes]) -> Dict[str, Tuple[int, int]]:
    writer = CheckpointWriter(path, durable=False)
    with writer:
        for name, payload in tensors.items():
            writer.add(name, payload)
    return writer.index


def read_header(path: str) -> Optional[int]:
    f = open(path, "rb")  # leak: a foreign magic returns None without close
    raw = f.read(HEADER.size)
    if len(raw) < HEADER.size:
        f.close()
        return None
    magic, version = HEADER.unpack(raw)
    if magic != MAGIC:
        return None
    f.close()
    return version


def open_checked(path: str) -> Optional[BinaryIO]:
    try:
        f = open(path, "rb")  # clean: near miss, closed for a bad header, returned otherwise
    except OSError:
        return None
    raw = f.read(HEADER.size)
    if len(raw) < HEADER.size or HEADER.unpack(raw)[0] != MAGIC:
        f.close()
        return None
    return f


def read_segment(path: str, offset: int, length: int) -> Optional[bytes]:
    f = open_checked(path)  # clean: closed in finally, None leaves first
    if f is None:
        return None
    try:
        f.seek(offset)
        return f.read(length)
    finally:
        f.close()


def is_checkpoint(path: str) -> bool:
    return open_checked(path) is not None  # leak: the opened file is only tested for None


def copy_segment(src: str, dst: str, offset: int, length: int) -> bool:
    source = open_checked(src)  # leak: an existing destination returns False
    if source is None:
        return False
    if os.path.exists(dst):
        return False
    target = open(dst, "wb")  # clean: closed after the copy
    source.seek(offset)
    target.write(source.read(length))
    target.close()
    source.close()
    return True


def iter_records(path: str) -> Iterator[bytes]:
    with open(path, "rb") as f:  # clean: with, also when the generator is closed
        while True:
            head = f.read(4)
            if len(head) < 4:
                return
            (size,) = struct.unpack("<I", head)
            yield f.read(size)


def merge_indexes(paths: List[str], out_path: str) -> int:
    merged: Dict[str, List[int]] = {}
    for path in paths:
        f = open(path)  # leak: a truncated index is caught and skipped with its file open
        try:
            part = json.load(f)
        except ValueError:
            continue
        f.close()
        merged.update(part)
    with open(out_path, "w") as out:  # clean: with
        json.dump(merged, out)
    return len(merged)


def dump_text(index: Dict[str, Tuple[int, int]], stream: Optional[io.TextIOBase] = None,
              path: str = "index.txt") -> None:
    owned = stream is None
    if owned:
        stream = open(path, "w")  # clean: near miss, closed under the flag that says it was opened here
    for name, (offset, length) in sorted(index.items()):
        stream.write(f"{name}\t{offset}\t{length}\n")
    if owned:
        stream.close()


class RollingLog:
    """Step log that moves to a new file every `per_file` lines."""

    def __init__(self, prefix: str, per_file: int) -> None:
        self.prefix = prefix
        self.per_file = per_file
        self.lines = 0
        self.current = open(f"{prefix}.0", "w")  # leak: write() puts the next file over it

    def write(self, line: str) -> None:
        if self.lines and self.lines % self.per_file == 0:
            self.current = open(f"{self.prefix}.{self.lines // self.per_file}", "w")  # leak: overwritten at the next roll
        self.current.write(line + "\n")
        self.lines += 1

    def close(self) -> None:
        self.current.close()
