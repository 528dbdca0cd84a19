"""Reads and writes sharded checkpoints: a JSON index next to length-prefixed binary shards."""
from __future__ import annotations

import json
import logging
import os
import struct
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple

logger = logging.getLogger(__name__)

MAGIC = b"SHRD"
HEADER = struct.Struct("<4sI")


class ShardError(Exception):
    pass


def open_shard(path: str) -> BinaryIO:
    fh = open(path, "rb")  # clean: handed to the caller, closed on a bad header
    magic = fh.read(4)
    if magic != MAGIC:
        fh.close()
        raise ShardError(f"{path}: bad magic {magic!r}")
    return fh


def open_shard_or_none(path: str) -> Optional[BinaryIO]:
    if not os.path.exists(path):
        return None
    fh = open(path, "rb")  # leak: a bad header returns None without close
    if fh.read(4) != MAGIC:
        logger.warning("skipping %s", path)
        return None
    return fh


def read_index(root: str) -> Dict[str, str]:
    with open(os.path.join(root, "index.json")) as fh:  # clean: with
        return json.load(fh)


def index_version(root: str) -> int:
    fh = open(os.path.join(root, "index.json"))  # leak: a malformed index is caught and 0 returned without close
    try:
        version = int(json.load(fh).get("__version__", 1))
    except ValueError:
        return 0
    fh.close()
    return version


def index_size(root: str) -> int:
    fh = open(os.path.join(root, "index.json"))  # clean: near miss, every return passes finally
    try:
        data = json.load(fh)
        if not isinstance(data, dict):
            return -1
        return len(data)
    except ValueError:
        return 0
    finally:
        fh.close()


def shard_length(path: str) -> int:
    return len(open_shard(path).read())  # leak: the open file is read and dropped


def shard_payload(path: str) -> bytes:
    fh = open_shard(path)  # clean: closed below
    (length,) = struct.unpack("<I", fh.read(4))
    data = fh.read(length)
    fh.close()
    return data


def first_present(paths: List[str]) -> Optional[bytes]:
    for path in paths:
        fh = open_shard_or_none(path)  # leak: an empty shard continues without close
        if fh is None:
            continue
        (length,) = struct.unpack("<I", fh.read(4))
        if length == 0:
            continue
        data = fh.read(length)
        fh.close()
        return data
    return None


def total_present(paths: List[str]) -> int:
    total = 0
    for path in paths:
        fh = open_shard_or_none(path)  # clean: near miss, None continues, else closed by with
        if fh is None:
            continue
        with fh:
            (length,) = struct.unpack("<I", fh.read(4))
            if length == 0:
                continue
            total += length
    return total


class ShardWriter:
    """Rolls over to a new shard when `limit` bytes are reached."""

    def __init__(self, root: str, limit: int) -> None:
        self.root = root
        self.limit = limit
        self.count = 0
        self.written = 0
        self._fh: Optional[BinaryIO] = None
        self.index: Dict[str, str] = {}

    def _roll(self) -> None:
        if self._fh is not None:
            self._fh.close()
        path = os.path.join(self.root, f"shard-{self.count:05d}.bin")
        self._fh = open(path, "wb")  # clean: near miss, the former shard is closed first and close() closes the last
        self.count += 1
        self.written = 0

    def write(self, key: str, payload: bytes) -> None:
        if self._fh is None or self.written + len(payload) > self.limit:
            self._roll()
        self._fh.write(HEADER.pack(MAGIC, len(payload)))
        self._fh.write(payload)
        self.written += len(payload)
        self.index[key] = os.path.basename(self._fh.name)

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None
        with open(os.path.join(self.root, "index.json"), "w") as out:  # clean: with
            json.dump(self.index, out)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class LogWriter:
    """Append-only metrics log, a new file for each epoch."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._fh = None

    def start_epoch(self, epoch: int) -> None:
        self._fh = open(os.path.join(self.root, f"metrics-{epoch}.log"), "a")  # leak: the epoch before is overwritten unclosed

    def log(self, **values: float) -> None:
        if self._fh is not None:
            self._fh.write(json.dumps(values) + "\n")

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None


class HandleCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._open: Dict[str, BinaryIO] = {}

    def get(self, path: str) -> BinaryIO:
        fh = self._open.get(path)
        if fh is None:
            while len(self._open) >= self.capacity:
                oldest = next(iter(self._open))
                self._open.pop(oldest).close()
            fh = self._open[path] = open(path, "rb")  # clean: near miss, the cache closes on eviction and in close_all
        fh.seek(0)
        return fh

    def close_all(self) -> None:
        for fh in self._open.values():
            fh.close()
        self._open.clear()


def iter_records(path: str) -> Iterator[bytes]:
    with open(path, "rb") as fh:  # clean: with, closed when the generator ends
        while True:
            head = fh.read(HEADER.size)
            if len(head) < HEADER.size:
                return
            magic, length = HEADER.unpack(head)
            if magic != MAGIC:
                return
            yield fh.read(length)


def merge_shards(sources: List[str], target: str) -> int:
    out = open(target, "wb")  # clean: closed in finally
    merged = 0
    try:
        for src in sources:
            for record in iter_records(src):
                out.write(HEADER.pack(MAGIC, len(record)))
                out.write(record)
                merged += 1
    finally:
        out.close()
    return merged


def open_pair(data_path: str, index_path: str) -> Optional[Tuple[BinaryIO, BinaryIO]]:
    data = open(data_path, "rb")  # leak: a missing index is caught and the data file stays open
    try:
        index = open(index_path, "rb")  # clean: handed to the caller
    except FileNotFoundError:
        return None
    return data, index


def verify(data_path: str, index_path: str) -> bool:
    pair = open_pair(data_path, index_path)  # clean: near miss, both closed in the loop
    if pair is None:
        return False
    sizes = []
    for fh in pair:
        sizes.append(len(fh.read()))
        fh.close()
    return sizes[0] >= sizes[1]
