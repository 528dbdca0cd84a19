from __future__ import annotations

import mmap
import struct
from typing import BinaryIO, Optional

MAGIC = b"SHRD"


class ShardHandle:
    def __init__(self, path: str, file: BinaryIO, index: list[int]) -> None:
        self.path = path
        self.file = file
        self.index = index
        self.uses = 0

    def record(self, i: int) -> bytes:
        lo, hi = self.index[i], self.index[i + 1]
        self.file.seek(lo)
        return self.file.read(hi - lo)

    def __len__(self) -> int:
        return len(self.index) - 1


def open_shard(path: str) -> Optional[ShardHandle]:
    f = open(path, "rb")  # leak: a shard with a bad magic gives None with the file open
    if f.read(4) != MAGIC:
        return None
    (n,) = struct.unpack("<I", f.read(4))
    index = list(struct.unpack(f"<{n}Q", f.read(8 * n)))
    return ShardHandle(path, f, index)


def count_records(path: str) -> int:
    f = open(path, "rb")  # clean: near miss, both returns come after a close
    if f.read(4) != MAGIC:
        f.close()
        return 0
    (n,) = struct.unpack("<I", f.read(4))
    f.close()
    return n - 1


def close_shard(h: ShardHandle) -> None:
    h.file.close()


class HandleCache:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: dict[str, ShardHandle] = {}

    def use(self, path: str) -> Optional[ShardHandle]:
        h = self._open.get(path)
        if h is None:
            self._shrink()
            h = open_shard(path)  # clean: near miss, kept in _open, closed on shrink or by close
            if h is None:
                return None
            self._open[path] = h
        h.uses += 1
        return h

    def unuse(self, h: ShardHandle) -> None:
        h.uses -= 1

    def _shrink(self) -> None:
        for path, h in list(self._open.items()):
            if len(self._open) < self.limit:
                return
            if h.uses == 0:
                close_shard(self._open.pop(path))

    def close(self) -> None:
        for h in self._open.values():
            close_shard(h)
        self._open.clear()


def scan(path: str, needle: bytes) -> int:
    with open(path, "rb") as f:  # clean: closed by with
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:  # clean: near miss, the return within leaves through with
            return m.find(needle)
