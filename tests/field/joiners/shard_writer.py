"""Sharded checkpoint files: writers, readers, index."""
from __future__ import annotations

import json
import os
import threading
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple


class ShardWriter:
    """Writes tensors as (name, bytes) and rolls over to a new file at max_bytes."""

    def __init__(self, root: str, max_bytes: int = 1 << 16):
        self.root = root
        self.max_bytes = max_bytes
        self.index: Dict[str, Tuple[int, int, int]] = {}
        self.shard = 0
        self._fh: Optional[BinaryIO] = None
        self._at = 0

    def _path(self, i: int) -> str:
        return os.path.join(self.root, f"shard-{i:05d}.bin")

    def _ensure(self, n: int) -> BinaryIO:
        if self._fh is not None and self._at + n > self.max_bytes:
            self._fh.close()
            self._fh = None
            self.shard += 1
        if self._fh is None:
            self._fh = open(self._path(self.shard), "wb")  # clean: near miss, the full one is closed above, close shuts the last
            self._at = 0
        return self._fh

    def write(self, name: str, data: bytes) -> None:
        fh = self._ensure(len(data))  # clean: the handle stays with the field
        fh.write(data)
        self.index[name] = (self.shard, self._at, len(data))
        self._at += len(data)

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None
        with open(os.path.join(self.root, "index.json"), "w") as f:  # clean: with
            json.dump(self.index, f)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class StripedWriter:
    """Round-robin over several files."""

    def __init__(self, root: str, width: int):
        self.root = root
        self.width = width
        self.files: List[BinaryIO] = []
        self.turn = 0

    def open_all(self) -> bool:
        for i in range(self.width):
            try:
                self.files.append(open(os.path.join(self.root, f"stripe-{i}"), "wb"))  # leak: OSError empties the list without close
            except OSError:
                self.files = []
                return False
        return True

    def write(self, data: bytes) -> None:
        self.files[self.turn % self.width].write(data)
        self.turn += 1

    def close(self) -> None:
        for f in self.files:
            f.close()
        self.files = []


def open_stripes(root: str, width: int) -> Optional[List[BinaryIO]]:
    files: List[BinaryIO] = []
    try:
        for i in range(width):
            files.append(open(os.path.join(root, f"stripe-{i}"), "rb"))  # clean: near miss, closed on OSError, else returned
    except OSError:
        for f in files:
            f.close()
        return None
    return files


def read_stripes(root: str, width: int) -> bytes:
    files = open_stripes(root, width)  # clean: None-checked, all closed
    if files is None:
        return b""
    out = b"".join(f.read() for f in files)
    for f in files:
        f.close()
    return out


def stripe_sizes(root: str, width: int) -> List[int]:
    files = open_stripes(root, width)  # leak: only the sizes are taken, nobody closes
    if files is None:
        return []
    return [os.fstat(f.fileno()).st_size for f in files]


class ShardReader:
    def __init__(self, root: str):
        self.root = root
        self.index: Dict[str, List[int]] = {}
        self.lock = threading.Lock()
        self._open: Dict[int, BinaryIO] = {}

    def load_index(self) -> bool:
        f = None
        try:
            f = open(os.path.join(self.root, "index.json"))  # clean: near miss, finally closes if it was opened
            self.index = json.load(f)
            return True
        except (OSError, ValueError):
            return False
        finally:
            if f is not None:
                f.close()

    def _shard(self, i: int) -> BinaryIO:
        f = self._open.get(i)
        if f is None:
            f = open(os.path.join(self.root, f"shard-{i:05d}.bin"), "rb")  # clean: kept in the table, close shuts all
            self._open[i] = f
        return f

    def read(self, name: str) -> Optional[bytes]:
        self.lock.acquire()  # leak: unknown names return with the lock held
        entry = self.index.get(name)
        if entry is None:
            return None
        shard, at, n = entry
        f = self._shard(shard)  # clean: the handle stays in the table
        f.seek(at)
        data = f.read(n)
        self.lock.release()
        return data

    def close(self) -> None:
        for f in self._open.values():
            f.close()
        self._open.clear()


def chunks(path: str, n: int, fh: Optional[BinaryIO] = None) -> Iterator[bytes]:
    """Reads from fh when given, else opens the file itself."""
    own = fh is None
    f = open(path, "rb") if own else fh  # clean: near miss, closed under the same flag
    try:
        while True:
            data = f.read(n)
            if not data:
                return
            yield data
    finally:
        if own:
            f.close()
