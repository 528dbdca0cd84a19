"""Record files: length-prefixed samples."""
from __future__ import annotations

import os
import struct
from typing import Dict, IO, Iterator


def read_records(path: str) -> Iterator[bytes]:
    f = open(path, "rb")  # leak: returns on a bad length without close
    while True:
        head = f.read(4)
        if len(head) < 4:
            break
        (n,) = struct.unpack("<I", head)
        if n > 1 << 20:
            return
        yield f.read(n)
    f.close()


def count_records(path: str) -> int:
    f = open(path, "rb")  # clean: near miss, the break leads to the close
    n = 0
    while True:
        head = f.read(4)
        if len(head) < 4:
            break
        f.seek(struct.unpack("<I", head)[0], os.SEEK_CUR)
        n += 1
    f.close()
    return n


class ShardHandles:
    """Open shard files, by path."""

    def __init__(self, limit: int = 8):
        self.limit = limit
        self.handles: Dict[str, IO[bytes]] = {}

    def handle(self, path: str) -> IO[bytes]:
        f = self.handles.get(path)
        if f is None:
            if len(self.handles) >= self.limit:
                _, old = self.handles.popitem()
                old.close()
            f = open(path, "rb")  # leak: reopen pops the entry and drops the file without close
            self.handles[path] = f
        return f

    def reopen(self, path: str) -> IO[bytes]:
        """After a shard was rewritten in place."""
        self.handles.pop(path, None)
        return self.handle(path)  # clean: the file stays with handles

    def close(self) -> None:
        for f in self.handles.values():
            f.close()
        self.handles.clear()
