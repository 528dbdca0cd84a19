"""Sharded dataset writer and reader with a bounded table of open file handles."""
from __future__ import annotations

import json
import os
import struct
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO, Dict, Iterable, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

HEADER = struct.Struct("<4sIQ")
MAGIC = b"SHRD"


class HandleTable:
    """Open read handles; idle ones are kept for reuse up to a limit."""

    def __init__(self, root: Path, limit: int = 32) -> None:
        self.root = root
        self.limit = limit
        self._parked: "OrderedDict[str, List[BinaryIO]]" = OrderedDict()
        self._out = 0

    def checkout(self, name: str) -> BinaryIO:
        self._out += 1
        parked = self._parked.get(name)
        if parked:
            fh = parked.pop()  # clean: handed to the caller
            if not parked:
                del self._parked[name]
            fh.seek(0)
            return fh
        return open(self.root / name, "rb")  # clean: handed to the caller

    def checkin(self, name: str, fh: BinaryIO) -> None:
        self._out -= 1
        if sum(len(v) for v in self._parked.values()) >= self.limit:
            fh.close()
            return
        self._parked.setdefault(name, []).append(fh)

    def close_all(self) -> None:
        while self._parked:
            _, handles = self._parked.popitem()  # clean: near miss, taken out in order to be closed
            for fh in handles:
                fh.close()


class ShardWriter:
    def __init__(self, root: Path, prefix: str, max_records: int) -> None:
        self.root = root
        self.prefix = prefix
        self.max_records = max_records
        self._index = 0
        self._count = 0
        self._fh: Optional[BinaryIO] = None
        self._manifest: Optional[BinaryIO] = None
        self._sizes: List[int] = []

    def __enter__(self) -> "ShardWriter":
        self._manifest = open(self.root / f"{self.prefix}.manifest", "wb")  # clean: closed in close
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _roll(self) -> None:
        if self._fh is not None:
            self._finish_shard()
        self._fh = open(self.root / f"{self.prefix}-{self._index:05d}.bin", "wb")  # clean: near miss, the previous shard is closed by _finish_shard
        self._fh.write(HEADER.pack(MAGIC, self._index, 0))
        self._index += 1
        self._count = 0

    def _finish_shard(self) -> None:
        fh, self._fh = self._fh, None
        fh.seek(0)
        fh.write(HEADER.pack(MAGIC, self._index - 1, self._count))
        self._sizes.append(self._count)
        fh.close()

    def write(self, record: Tensor) -> None:
        if self._fh is None or self._count >= self.max_records:
            self._roll()
        payload = record.contiguous().cpu().numpy().tobytes()
        self._fh.write(struct.pack("<Q", len(payload)))
        self._fh.write(payload)
        self._count += 1

    def close(self) -> None:
        if self._fh is not None:
            self._finish_shard()
        if self._manifest is not None:
            self._manifest.write(json.dumps(self._sizes).encode())
            self._manifest.close()
            self._manifest = None


class RotatingLogWriter:
    def __init__(self, root: Path, every: int) -> None:
        self.root = root
        self.every = every
        self._step = 0
        self._fh: Optional[BinaryIO] = None

    def rotate(self) -> None:
        if self._fh is not None:
            self._fh.flush()
        self._fh = open(self.root / f"log-{self._step}.bin", "wb")  # leak: overwrites the file opened by the rotation before, which is only flushed

    def append(self, blob: bytes) -> None:
        if self._fh is None or self._step % self.every == 0:
            self.rotate()
        self._step += 1
        self._fh.write(blob)

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None


class ShardReader:
    def __init__(self, table: HandleTable) -> None:
        self.table = table

    def header(self, name: str) -> Optional[Tuple[int, int]]:
        fh = self.table.checkout(name)  # leak: a short or foreign header returns without checkin
        raw = fh.read(HEADER.size)
        if len(raw) < HEADER.size:
            return None
        magic, index, count = HEADER.unpack(raw)
        if magic != MAGIC:
            return None
        self.table.checkin(name, fh)
        return index, count

    def records(self, name: str) -> Iterator[bytes]:
        fh = self.table.checkout(name)  # clean: near miss, the generator checks in on every way out, early close included
        try:
            if len(fh.read(HEADER.size)) < HEADER.size:
                return
            while True:
                raw = fh.read(8)
                if len(raw) < 8:
                    return
                yield fh.read(struct.unpack("<Q", raw)[0])
        finally:
            self.table.checkin(name, fh)

    def total_bytes(self, names: Iterable[str]) -> int:
        total = 0
        for name in names:
            fh = self.table.checkout(name)  # clean: near miss, the conditional branch checks in before it continues
            size = fh.seek(0, os.SEEK_END)
            if size <= HEADER.size:
                self.table.checkin(name, fh)
                continue
            total += size - HEADER.size
            self.table.checkin(name, fh)
        return total

    def first_match(self, names: Iterable[str], prefix: bytes) -> Optional[str]:
        for name in names:
            fh = self.table.checkout(name)  # leak: the match returns before checkin
            fh.seek(HEADER.size + 8)
            if fh.read(len(prefix)) == prefix:
                return name
            self.table.checkin(name, fh)
        return None


def load_manifest(path: Path) -> List[int]:
    with open(path, "rb") as fh:  # clean: the with block closes it
        return json.loads(fh.read())


def merge_shards(root: Path, names: List[str], target: str) -> int:
    written = 0
    sink = open(root / target, "wb")  # clean: near miss, closed in the finally clause
    try:
        for name in names:
            part = open(root / name, "rb")  # clean: closed at the end of the iteration
            part.seek(HEADER.size)
            written += sink.write(part.read())
            part.close()
    finally:
        sink.close()
    return written
