"""Reading and writing sharded checkpoints, with a small cache of open descriptors."""
from __future__ import annotations

import json
import mmap
import os
import struct
from typing import Dict, Iterator, List, Optional

import torch

MAGIC = b"SHRD"


def read_header(path: str) -> Optional[dict]:
    fh = open(path, "rb")  # leak: the early return for a foreign magic leaves the file open
    if fh.read(4) != MAGIC:
        return None
    (length,) = struct.unpack("<I", fh.read(4))
    header = json.loads(fh.read(length))
    fh.close()
    return header


def read_index(path: str) -> Optional[dict]:
    fh = open(path, "rb")  # clean: near miss, the early returns lie inside a try whose finally closes
    try:
        if fh.read(4) != MAGIC:
            return None
        (length,) = struct.unpack("<I", fh.read(4))
        if length == 0:
            return None
        return json.loads(fh.read(length))
    finally:
        fh.close()


def map_shard(path: str) -> mmap.mmap:
    with open(path, "rb") as fh:  # clean: closed by with, the mapping has its own descriptor
        return mmap.mmap(fh.fileno(), 0, access=mmap.ACCESS_READ)  # clean: the mapping is returned to the caller


def shard_tensor(path: str, offset: int, count: int) -> torch.Tensor:
    view = map_shard(path)  # clean: near miss, closed after the bytes have been copied out
    raw = bytearray(view[offset : offset + count * 2])
    view.close()
    return torch.frombuffer(raw, dtype=torch.float16)


def shard_magic_ok(path: str) -> bool:
    view = map_shard(path)  # leak: closed only when the magic matches
    if view[:4] == MAGIC:
        view.close()
        return True
    return False


def iter_records(path: str) -> Iterator[bytes]:
    with open(path, "rb") as fh:  # clean: near miss, with inside a generator closes at its end or on close
        while True:
            head = fh.read(4)
            if len(head) < 4:
                return
            (size,) = struct.unpack("<I", head)
            yield fh.read(size)


def merge_logs(paths: List[str], out_path: str) -> int:
    total = 0
    out = open(out_path, "ab")  # clean: closed at the single end of the function
    for path in paths:
        src = open(path, "rb")  # leak: the continue for an empty log skips close
        data = src.read()
        if not data:
            continue
        out.write(data)
        total += len(data)
        src.close()
    out.close()
    return total


class DescriptorCache:
    """At most `limit` descriptors are kept open at once."""

    def __init__(self, limit: int = 32):
        self.limit = limit
        self.fds: Dict[str, int] = {}

    def descriptor(self, path: str) -> int:
        fd = self.fds.get(path)
        if fd is not None:
            return fd
        if len(self.fds) >= self.limit:
            victim = next(iter(self.fds))
            os.close(self.fds.pop(victim))
        fd = os.open(path, os.O_RDONLY)  # clean: near miss, kept in fds, closed by eviction or shutdown
        self.fds[path] = fd
        return fd

    def refresh(self, path: str) -> int:
        """Reopen a shard that has been rewritten."""
        fd = os.open(path, os.O_RDONLY)  # leak: overwrites a descriptor that is still open in fds
        self.fds[path] = fd
        return fd

    def invalidate(self, path: str) -> None:
        fd = self.fds.pop(path, None)
        if fd is not None:
            os.close(fd)

    def reopen(self, path: str) -> int:
        self.invalidate(path)
        fd = os.open(path, os.O_RDONLY)  # clean: near miss, the former descriptor has been closed by invalidate
        self.fds[path] = fd
        return fd

    def shutdown(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class ShardWriter:
    """Rolls over to a new file when the current one is full."""

    def __init__(self, prefix: str, limit: int):
        self.prefix = prefix
        self.limit = limit
        self.part = 0
        self.written = 0
        self.out = open(self._name(), "wb")  # clean: held in the field, closed by roll or finish

    def _name(self) -> str:
        return f"{self.prefix}-{self.part:05d}.bin"

    def write(self, blob: bytes) -> None:
        if self.written + len(blob) > self.limit:
            self._roll()
        self.out.write(blob)
        self.written += len(blob)

    def _roll(self) -> None:
        self.out.flush()
        self.part += 1
        self.written = 0
        self.out = open(self._name(), "wb")  # leak: overwrites the part that was flushed and never closed

    def restart(self, prefix: str) -> None:
        self.out.close()
        self.prefix, self.part, self.written = prefix, 0, 0
        self.out = open(self._name(), "wb")  # clean: near miss, the former file is closed first

    def finish(self) -> None:
        self.out.close()
