"""Reads tokenised shards: index files, data files, and a small cache of opened shards.

Shards are opened through a ShardCache which keeps at most `limit` files open and counts their users.
"""
from __future__ import annotations

import io
import json
import os
import struct
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence

MAGIC = b"SHRD"


class OpenShard:
    def __init__(self, path: Path, fh: io.BufferedReader, offsets: List[int]):
        self.path = path
        self.fh = fh
        self.offsets = offsets
        self.users = 0

    def read(self, i: int) -> bytes:
        self.fh.seek(self.offsets[i])
        return self.fh.read(self.offsets[i + 1] - self.offsets[i])


def load_offsets(path: Path) -> List[int]:
    with open(path.with_suffix(".idx"), "rb") as fh:  # clean: closed by the with
        raw = fh.read()
    return list(struct.unpack(f"<{len(raw) // 8}Q", raw))


def open_data(path: Path):
    """File positioned after the magic, or None if the magic is wrong."""
    fh = open(path, "rb")  # clean: returned, or closed when the magic is wrong
    if fh.read(4) != MAGIC:
        fh.close()
        return None
    return fh


def is_shard(path: Path) -> bool:
    fh = open_data(path)  # leak: compared with None and never closed
    return fh is not None


def read_manifest(root: Path) -> Dict[str, int]:
    fh = open(root / "manifest.json")  # leak: the return for an old version leaves it open
    meta = json.load(fh)
    if meta.get("version", 1) < 2:
        return {name: 0 for name in meta["shards"]}
    sizes = {s["name"]: s["tokens"] for s in meta["shards"]}
    fh.close()
    return sizes


def append_journal(root: Path, lines: Sequence[str], sync: bool) -> int:
    fh = open(root / "journal.log", "a")  # clean: near miss, closed with and without sync
    n = 0
    for line in lines:
        if not line.strip():
            continue
        fh.write(line.rstrip("\n") + "\n")
        n += 1
    if sync:
        fh.flush()
        os.fsync(fh.fileno())
    fh.close()
    return n


class ShardCache:
    def __init__(self, limit: int = 32):
        self.limit = limit
        self._shards: "OrderedDict[Path, OpenShard]" = OrderedDict()
        self._tails: Dict[Path, io.BufferedReader] = {}

    def acquire(self, path: Path) -> Optional[OpenShard]:
        """A use of the shard; paired with `done`."""
        shard = self._shards.get(path)
        if shard is None:
            fh = open_data(path)  # clean: near miss, kept in the shard, trim or close_all closes it
            if fh is None:
                return None
            shard = OpenShard(path, fh, load_offsets(path))
            self._shards[path] = shard
        shard.users += 1
        self._shards.move_to_end(path)
        self.trim()
        return shard

    def done(self, shard: OpenShard) -> None:
        shard.users -= 1

    def trim(self) -> None:
        idle = [p for p, s in self._shards.items() if s.users == 0]
        while len(self._shards) > self.limit and idle:
            self._shards.pop(idle.pop(0)).fh.close()

    def follow(self, path: Path) -> io.BufferedReader:
        """Tail of a shard that is still being written."""
        if path not in self._tails:
            self._tails[path] = open(path, "rb")  # leak: unfollow pops it and close_all does not see it
        return self._tails[path]

    def unfollow(self, path: Path) -> bool:
        return self._tails.pop(path, None) is not None

    def close_all(self) -> None:
        for shard in self._shards.values():
            shard.fh.close()
        self._shards.clear()
        self._tails.clear()


def documents(cache: ShardCache, paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        shard = cache.acquire(path)  # clean: done at the end of the turn, or None
        if shard is None:
            continue
        for i in range(len(shard.offsets) - 1):
            yield shard.read(i)
        cache.done(shard)


def long_documents(cache: ShardCache, paths: Sequence[Path], least: int) -> Iterator[bytes]:
    for path in paths:
        shard = cache.acquire(path)  # leak: a shard with no offsets is skipped without done
        if shard is None or len(shard.offsets) < 2:
            continue
        for i in range(len(shard.offsets) - 1):
            if shard.offsets[i + 1] - shard.offsets[i] >= least:
                yield shard.read(i)
        cache.done(shard)


def interleave(cache: ShardCache, paths: Sequence[Path]) -> Iterator[bytes]:
    """Round robin over all shards."""
    with ExitStack() as stack:
        shards = []
        for path in paths:
            shard = cache.acquire(path)  # clean: near miss, the exit stack calls done
            if shard is not None:
                stack.callback(cache.done, shard)
                shards.append(shard)
        row = 0
        while any(row < len(s.offsets) - 1 for s in shards):
            for s in shards:
                if row < len(s.offsets) - 1:
                    yield s.read(row)
            row += 1


def merge_shards(cache: ShardCache, first: Path, second: Path, out: Path) -> int:
    a = cache.acquire(first)  # leak: without a second one it returns and a is not done
    if a is None:
        return 0
    b = cache.acquire(second)  # clean: done below, or None
    if b is None:
        return 0
    total = 0
    with open(out, "wb") as fh:  # clean: closed by the with
        fh.write(MAGIC)
        for shard in (a, b):
            for i in range(len(shard.offsets) - 1):
                total += fh.write(shard.read(i))
    cache.done(a)
    cache.done(b)
    return total


class RollingWriter:
    """Starts a new output file whenever the current one is full."""

    def __init__(self, root: Path, limit: int):
        self.root = root
        self.limit = limit
        self.part = 0
        self.written = 0
        self.notes: Optional[io.TextIOBase] = None
        self.fh = open(root / "part-0", "wb")  # clean: near miss, roll and close close the current one

    def write(self, blob: bytes) -> None:
        if self.written + len(blob) > self.limit:
            self.roll()
        self.written += self.fh.write(blob)

    def roll(self) -> None:
        self.fh.close()
        self.part += 1
        self.written = 0
        self.fh = open(self.root / f"part-{self.part}", "wb")  # clean: closed by the next roll or by close

    def annotate(self, topic: str) -> None:
        """Further notes go to a file for the topic."""
        self.notes = open(self.root / f"notes-{topic}", "a")  # leak: the next topic replaces it unclosed

    def note(self, text: str) -> None:
        if self.notes is not None:
            self.notes.write(f"{self.part}: {text}\n")

    def close(self) -> None:
        self.fh.close()
        if self.notes is not None:
            self.notes.close()
            self.notes = None
