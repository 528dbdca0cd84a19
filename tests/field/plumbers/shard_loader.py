"""Reads sharded checkpoints: index, headers, tensors and a per-model lock file."""
from __future__ import annotations

import json
import os
import struct
from contextlib import ExitStack
from typing import BinaryIO, Dict, Iterator, List, Optional, TextIO, Tuple

try:
    import fcntl
except ImportError:
    fcntl = None

HEADER = struct.Struct("<Q")


def read_header(path: str) -> Dict[str, dict]:
    f = open(path, "rb")  # leak: the short-file branch returns with it open
    raw = f.read(HEADER.size)
    if len(raw) < HEADER.size:
        return {}
    (n,) = HEADER.unpack(raw)
    meta = json.loads(f.read(n))
    f.close()
    return meta


def read_index(folder: str) -> Dict[str, str]:
    path = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(path):
        return {}
    with open(path) as f:  # clean: with
        return json.load(f)["weight_map"]


def is_lfs_pointer(path: str) -> bool:
    return open(path, "rb").read(8) == b"version "  # leak: the handle is never closed


def open_shard(path: str) -> Tuple[BinaryIO, int]:
    """Opens a shard positioned at its data section."""
    f = open(path, "rb")  # clean: near miss, closed on a bad header, else the caller's
    try:
        (n,) = HEADER.unpack(f.read(HEADER.size))
    except struct.error:
        f.close()
        raise ValueError(f"{path}: truncated header")
    f.seek(HEADER.size + n)
    return f, HEADER.size + n


def first_bytes(paths: List[str], n: int) -> List[bytes]:
    out: List[bytes] = []
    for path in paths:
        try:
            f, _ = open_shard(path)  # leak: an empty payload goes on to the next shard with f open
        except ValueError:
            continue
        chunk = f.read(n)
        if not chunk:
            continue
        out.append(chunk)
        f.close()
    return out


class ShardReader:
    """Keeps one open handle per shard until `close`."""

    def __init__(self, folder: str, max_open: int = 8) -> None:
        self.folder = folder
        self.max_open = max_open
        self.weight_map = read_index(folder)
        self._files: Dict[str, BinaryIO] = {}
        self._headers: Dict[str, dict] = {}

    def _handle(self, shard: str) -> BinaryIO:
        f = self._files.get(shard)
        if f is not None:
            return f
        if len(self._files) >= self.max_open:
            oldest = self._files.pop(next(iter(self._files)))
            oldest.close()
        f = open(os.path.join(self.folder, shard), "rb")  # clean: cached, closed on eviction or by close
        self._files[shard] = f
        return f

    def tensor_bytes(self, name: str) -> Optional[bytes]:
        shard = self.weight_map.get(name)
        if shard is None:
            return None
        if shard not in self._headers:
            self._headers[shard] = read_header(os.path.join(self.folder, shard))
        info = self._headers[shard].get(name)
        if info is None:
            return None
        begin, end = info["data_offsets"]
        f = self._handle(shard)
        f.seek(begin)
        return f.read(end - begin)

    def close(self) -> None:
        while self._files:
            _, f = self._files.popitem()
            f.close()

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ModelLock:
    """Advisory lock so that only one rank downloads or converts."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fh: Optional[TextIO] = None

    def acquire(self) -> bool:
        fh = open(self.path, "w")  # clean: near miss, closed where the lock is refused, else kept for release
        if fcntl is not None:
            try:
                fcntl.flock(fh, fcntl.LOCK_EX | fcntl.LOCK_NB)  # clean: undone by closing the handle
            except OSError:
                fh.close()
                return False
        self._fh = fh
        return True

    def release(self) -> None:
        if self._fh is None:
            return
        self._fh.close()
        self._fh = None


def convert(folder: str, names: List[str], out_path: str) -> int:
    lock = ModelLock(out_path + ".lock")
    if not lock.acquire():  # leak: the branch for an output that exists returns with the lock held
        return 0
    if os.path.exists(out_path):
        return 0
    with ShardReader(folder) as reader, open(out_path, "wb") as out:  # clean: with
        for name in names:
            data = reader.tensor_bytes(name)
            if data is None:
                continue
            out.write(data)
    lock.release()
    return len(names)


def convert_locked(folder: str, out_path: str) -> bool:
    lock = ModelLock(out_path + ".lock")
    if not lock.acquire():  # clean: released in finally
        return False
    try:
        if os.path.exists(out_path):
            return True
        with ShardReader(folder) as reader:
            blobs = [reader.tensor_bytes(n) or b"" for n in reader.weight_map]
        with open(out_path, "wb") as out:  # clean: with
            out.writelines(blobs)
        return True
    finally:
        lock.release()


def merge(paths: List[str], out_path: str) -> int:
    with ExitStack() as stack:
        parts = []
        for path in paths:
            if os.path.getsize(path) == 0:
                continue
            parts.append(stack.enter_context(open(path, "rb")))  # clean: near miss, the stack closes it
        out = stack.enter_context(open(out_path, "wb"))  # clean: the stack closes it
        return sum(out.write(p.read()) for p in parts)


def iter_lines(path: str) -> Iterator[str]:
    f = open(path)  # leak: `limit` in count_until stops the generator before the close
    for line in f:
        yield line.rstrip("\n")
    f.close()


def count_until(path: str, limit: int) -> int:
    seen = 0
    for line in iter_lines(path):
        seen += 1
        if seen >= limit or line == "END":
            break
    return seen


class LoadTrace:
    """Optional log of what was loaded and when."""

    def __init__(self, path: Optional[str]) -> None:
        self.path = path
        self._log: Optional[TextIO] = None

    def start(self) -> None:
        if self.path:
            self._log = open(self.path, "a")  # clean: near miss, stop closes it under the same condition

    def write(self, line: str) -> None:
        if self._log is not None:
            self._log.write(line + "\n")

    def stop(self) -> None:
        if self.path:
            self._log.close()
            self._log = None
