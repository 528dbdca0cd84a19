"""Sharded checkpoints: index, header cache, shard readers and writers."""
from __future__ import annotations

import io
import json
import logging
import os
import struct
import tempfile
from typing import Any, BinaryIO, Dict, IO, Iterator, List, Optional, TextIO, Tuple

logger = logging.getLogger(__name__)

MAGIC = b"SHRD"


def read_header(path: str) -> Optional[Dict[str, Any]]:
    f = open(path, "rb")  # leak: the bad magic return does not close
    if f.read(4) != MAGIC:
        return None
    (n,) = struct.unpack("<I", f.read(4))
    header = json.loads(f.read(n))
    f.close()
    return header


def read_header_strict(path: str) -> Dict[str, Any]:
    f = open(path, "rb")  # clean: finally
    try:
        if f.read(4) != MAGIC:
            raise ValueError(f"{path}: bad magic")
        (n,) = struct.unpack("<I", f.read(4))
        return json.loads(f.read(n))
    finally:
        f.close()


def open_shard(path: str, offset: int = 0) -> BinaryIO:
    f = open(path, "rb")  # clean: handed to the caller
    if offset:
        f.seek(offset)
    return f


def shard_size(path: str) -> int:
    return open_shard(path).seek(0, io.SEEK_END)  # leak: the handle lives in a temporary only


def first_bytes(path: str, n: int) -> bytes:
    with open_shard(path) as f:  # clean: near miss, the returned handle is its own context manager
        return f.read(n)


def load_index(root: str) -> Dict[str, str]:
    for name in ("model.index.json", "pytorch_model.index.json"):
        try:
            f = open(os.path.join(root, name))  # leak: an index without weight_map is skipped by continue, open
        except FileNotFoundError:
            continue
        data = json.load(f)
        if "weight_map" not in data:
            continue
        f.close()
        return data["weight_map"]
    return {}


def count_lines(paths: List[str]) -> int:
    total = 0
    for p in paths:
        try:
            f = open(p, encoding="utf-8")  # clean: near miss, else branch and finally close what was opened
        except OSError as e:
            logger.warning("%s: %s", p, e)
            continue
        else:
            try:
                total += sum(1 for _ in f)
            finally:
                f.close()
    return total


def merge_manifests(paths: List[str], out: str) -> None:
    handles: List[TextIO] = []
    dst = open(out, "w")  # clean: closed in the finally
    try:
        for p in paths:
            handles.append(open(p))  # clean: near miss, the list is closed in the finally
        for h in handles:
            dst.write(h.read())
    finally:
        dst.close()
        for h in handles:
            h.close()


class ShardReader:
    """Random access to tensors over several shards, handles kept open."""

    def __init__(self, root: str, weight_map: Dict[str, str], max_open: int = 4) -> None:
        self.root = root
        self.weight_map = weight_map
        self.max_open = max_open
        self._open: Dict[str, BinaryIO] = {}
        self._current: Optional[BinaryIO] = None

    def handle(self, shard: str) -> BinaryIO:
        f = self._open.get(shard)
        if f is None:
            if len(self._open) >= self.max_open:
                _, old = self._open.popitem()
                old.close()
            f = open_shard(os.path.join(self.root, shard))  # clean: near miss, in the table; evicted entries are closed
            self._open[shard] = f
        return f

    def select(self, shard: str) -> None:
        self._current = open_shard(os.path.join(self.root, shard))  # leak: the handle selected before is overwritten
        self._current.seek(4)

    def read(self, name: str, n: int) -> bytes:
        f = self.handle(self.weight_map[name])
        f.seek(0)
        return f.read(n)

    def read_many(self, names: List[str], n: int) -> Iterator[Tuple[str, bytes]]:
        last, f = None, None
        for name in names:
            shard = self.weight_map[name]
            if shard != last:
                f = open(os.path.join(self.root, shard), "rb")  # leak: rebound when the next name is in another shard
                last = shard
            yield name, f.read(n)
        if f is not None:
            f.close()

    def read_sorted(self, names: List[str], n: int) -> Iterator[Tuple[str, bytes]]:
        last, f = None, None
        try:
            for name in sorted(names, key=self.weight_map.__getitem__):
                shard = self.weight_map[name]
                if shard != last:
                    if f is not None:
                        f.close()
                    f = open(os.path.join(self.root, shard), "rb")  # clean: near miss, closed before rebinding and in the finally
                    last = shard
                yield name, f.read(n)
        finally:
            if f is not None:
                f.close()

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None
        for f in self._open.values():
            f.close()
        self._open.clear()


class ShardWriter:

    def __init__(self, path: str, log: Optional[TextIO] = None) -> None:
        self.path = path
        self._f = open(path, "wb")  # clean: closed by close()
        self._owns_log = log is None
        self._log = open(path + ".log", "a") if log is None else log  # clean: near miss, close() closes it if the writer owns it

    def write(self, header: Dict[str, Any], payload: bytes) -> None:
        raw = json.dumps(header).encode()
        self._f.write(MAGIC + struct.pack("<I", len(raw)) + raw + payload)
        self._log.write(f"{len(payload)}\n")

    def close(self) -> None:
        self._f.close()
        if self._owns_log:
            self._log.close()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def save_atomic(path: str, payload: bytes) -> bool:
    fd, tmp = tempfile.mkstemp(dir=os.path.dirname(path) or ".")  # clean: the descriptor is adopted by fdopen
    with os.fdopen(fd, "wb") as f:  # clean: with
        f.write(payload)
    os.replace(tmp, path)
    return True


def acquire_save_lock(path: str) -> Optional[int]:
    try:
        return os.open(path + ".lock", os.O_CREAT | os.O_EXCL)  # clean: the descriptor goes to the caller
    except FileExistsError:
        return None


def release_save_lock(path: str, fd: int) -> None:
    os.close(fd)
    os.unlink(path + ".lock")


def save_exclusive(path: str, payload: bytes) -> bool:
    fd = acquire_save_lock(path)  # leak: the return for an empty payload keeps the lock file and its descriptor
    if fd is None:
        return False
    if not payload:
        logger.warning("nothing to save")
        return False
    save_atomic(path, payload)
    release_save_lock(path, fd)
    return True


def write_shard(path: str, payload: bytes) -> None:
    with ShardWriter(path) as w:  # clean: context manager
        w.write({"n": len(payload)}, payload)
