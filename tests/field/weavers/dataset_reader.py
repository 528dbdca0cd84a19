"""Sharded JSONL / binary dataset readers for post-training."""
from __future__ import annotations

import gzip
import json
import os
import struct
from dataclasses import dataclass
from typing import IO, Dict, Iterator, List, Optional, Tuple

HEADER = struct.Struct("<4sI")
MAGIC = b"TOKB"


@dataclass
class Shard:
    path: str
    rows: int = 0


def open_text(path: str) -> IO[str]:
    if path.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")  # clean: returned
    return open(path, encoding="utf-8")  # clean: returned


def count_rows(path: str) -> int:
    with open_text(path) as fh:  # clean: with
        return sum(1 for line in fh if line.strip())


def first_row(path: str) -> Optional[dict]:
    fh = open_text(path)  # leak: a malformed first line is caught and None returned with the file open
    try:
        row = json.loads(fh.readline())
    except ValueError:
        return None
    fh.close()
    return row


def schema_of(path: str) -> List[str]:
    fh = open_text(path)  # clean: near miss, every return is inside the try with its finally
    try:
        for line in fh:
            if not line.strip():
                continue
            try:
                return sorted(json.loads(line))
            except ValueError:
                continue
        return []
    finally:
        fh.close()


def iter_rows(path: str, skip_bad: bool = True) -> Iterator[dict]:
    fh = open_text(path)  # clean: generator with finally
    try:
        for line in fh:
            try:
                yield json.loads(line)
            except ValueError:
                if not skip_bad:
                    raise
    finally:
        fh.close()


def head(path: str, n: int) -> Iterator[dict]:
    fh = open_text(path)  # leak: the generator returns at the n-th row and never reaches the close
    for i, line in enumerate(fh):
        if i >= n:
            return
        yield json.loads(line)
    fh.close()


class TokenBin:
    """Random access into a packed token file. `close` when done."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fh: Optional[IO[bytes]] = open(path, "rb")  # clean: owned by the object, closed by close()
        magic, self.count = HEADER.unpack(self._fh.read(HEADER.size))
        self.valid = magic == MAGIC

    def read(self, i: int) -> int:
        self._fh.seek(HEADER.size + 4 * i)
        return int.from_bytes(self._fh.read(4), "little")

    def reopen(self, path: str) -> None:
        fresh = open(path, "rb")  # clean: near miss, the old handle is closed before it is overwritten
        if self._fh is not None:
            self._fh.close()
        self._fh = fresh
        self.path = path

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None


def total_tokens(paths: List[str]) -> int:
    total = 0
    for p in paths:
        tb = TokenBin(p)  # leak: an invalid shard is skipped by `continue` without close
        if not tb.valid:
            continue
        total += tb.count
        tb.close()
    return total


class ShardMixer:
    """Interleaves rows of several shards; keeps one open handle per shard."""

    def __init__(self, shards: List[Shard]) -> None:
        self.shards = shards
        self._open: Dict[str, IO[str]] = {}
        self._current: Optional[IO[str]] = None

    def _handle(self, shard: Shard) -> IO[str]:
        fh = self._open.get(shard.path)
        if fh is None:
            fh = self._open[shard.path] = open_text(shard.path)  # clean: kept in the table until exhausted or close()
        return fh

    def next_row(self, i: int) -> Optional[dict]:
        shard = self.shards[i % len(self.shards)]
        line = self._handle(shard).readline()  # clean: near miss, the table owns the handle
        if not line:
            self._open.pop(shard.path).close()
            return None
        return json.loads(line)

    def advance(self, i: int) -> None:
        self._current = open_text(self.shards[i].path)  # leak: the handle of the previous shard is overwritten unclosed

    def read_current(self) -> str:
        return self._current.readline() if self._current is not None else ""

    def retire(self, keep: int) -> int:
        """Close the handles beyond the first `keep`."""
        victims = list(self._open)[keep:]
        for path in victims:
            self._open.pop(path).close()
        return len(victims)

    def close(self) -> None:
        for fh in self._open.values():
            fh.close()
        self._open.clear()
        if self._current is not None:
            self._current.close()
            self._current = None


def merge_shards(a: str, b: str, out: str) -> Tuple[int, bool]:
    src_a = open_text(a)  # leak: an absent second shard returns early with the first one open
    if not os.path.exists(b):
        return 0, False
    src_b = open_text(b)  # clean: closed in the finally
    n = 0
    try:
        with open(out, "w", encoding="utf-8") as dst:  # clean: with
            for src in (src_a, src_b):
                for line in src:
                    dst.write(line)
                    n += 1
    finally:
        src_a.close()
        src_b.close()
    return n, True
