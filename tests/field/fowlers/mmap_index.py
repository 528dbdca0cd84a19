"""Indexed token files for pretraining: mapped shards are shared by reference counts."""
from __future__ import annotations

import logging
import mmap
import struct
import threading
from array import array
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Optional, Sequence

log = logging.getLogger(__name__)
HEADER = struct.Struct("<8sQQ")


@dataclass(eq=False)
class Mapped:
    path: Path
    file: BinaryIO
    mem: mmap.mmap
    users: int = 0

    def tokens(self, start: int, stop: int) -> array:
        return array("H", self.mem[HEADER.size + 2 * start:HEADER.size + 2 * stop])


class ShardTable:
    """Every path is mapped once; the last user unmaps it."""

    def __init__(self) -> None:
        self._by_path: dict[Path, Mapped] = {}
        self._lock = threading.RLock()

    def use(self, path: Path) -> Mapped:
        with self._lock:
            shard = self._by_path.get(path)
            if shard is None:
                f = open(path, "rb")  # clean: near miss, kept in the shard, the last disuse closes it
                shard = Mapped(path, f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
                self._by_path[path] = shard
            shard.users += 1
            return shard

    def disuse(self, shard: Mapped) -> None:
        with self._lock:
            shard.users -= 1
            if shard.users == 0:
                del self._by_path[shard.path]
                shard.mem.close()
                shard.file.close()


TABLE = ShardTable()


def document(path: Path, start: int, stop: int) -> Optional[array]:
    shard = TABLE.use(path)  # leak: a range outside the file returns without disuse
    if 2 * stop + HEADER.size > len(shard.mem):
        log.warning("%s: %d is past the end", path, stop)
        return None
    tokens = shard.tokens(start, stop)
    TABLE.disuse(shard)
    return tokens


def longest_shard(paths: Sequence[Path]) -> Optional[Mapped]:
    """The shard with the most bytes, in use; the caller ends that."""
    best: Optional[Mapped] = None
    for path in paths:
        shard = TABLE.use(path)  # clean: near miss, the shorter of the two is disused, the longest handed on
        if best is not None and len(best.mem) >= len(shard.mem):
            TABLE.disuse(shard)
            continue
        if best is not None:
            TABLE.disuse(best)
        best = shard
    return best


def longest_length(paths: Sequence[Path]) -> int:
    shard = longest_shard(paths)  # leak: only its length is used
    return 0 if shard is None else (len(shard.mem) - HEADER.size) // 2


class BlendedReader:
    """Several shards with weights; all are in use until close."""

    def __init__(self, table: ShardTable, weights: dict[Path, float]) -> None:
        self._table = table
        self._shards: list[Mapped] = []
        self._weights: list[float] = []
        for path, w in weights.items():
            shard = table.use(path)  # leak: a shard of weight zero is in use but not in the list that close ends
            if w > 0.0:
                self._shards.append(shard)
                self._weights.append(w)

    def read(self, which: int, start: int, n: int) -> array:
        return self._shards[which].tokens(start, start + n)

    def close(self) -> None:
        for shard in self._shards:
            self._table.disuse(shard)
        self._shards.clear()


class SequentialReader:
    """One shard after the other, n tokens at a time."""

    def __init__(self, table: ShardTable, paths: Sequence[Path]) -> None:
        self._table, self._paths = table, list(paths)
        self._at = 0
        self._pos = 0
        self._cur: Optional[Mapped] = None

    def _advance(self) -> bool:
        if self._cur is not None:
            self._table.disuse(self._cur)
            self._cur = None
        if self._at == len(self._paths):
            return False
        self._cur = self._table.use(self._paths[self._at])  # clean: near miss, the next advance or close ends it
        self._at += 1
        self._pos = 0
        return True

    def read(self, n: int) -> Optional[array]:
        while self._cur is None or HEADER.size + 2 * (self._pos + n) > len(self._cur.mem):
            if not self._advance():
                return None
        out = self._cur.tokens(self._pos, self._pos + n)
        self._pos += n
        return out

    def seek_shard(self, index: int) -> None:
        """Jumps to a shard by its number, for a resumed run."""
        self._at = index + 1
        self._pos = 0
        self._cur = self._table.use(self._paths[index])  # leak: the present shard is overwritten while in use

    def close(self) -> None:
        if self._cur is not None:
            self._table.disuse(self._cur)
            self._cur = None


def count_words(paths: Sequence[Path], vocabulary: int) -> list[int]:
    counts = [0] * vocabulary
    with closing(SequentialReader(TABLE, paths)) as reader:  # clean: closing() ends its shard
        while (chunk := reader.read(4096)) is not None:
            for t in chunk:
                counts[t] += 1
    return counts


class TurnLock:
    """Readers of one disk take turns; a re-entrant count for each thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.depth = 0

    def enter_turn(self) -> int:
        self._lock.acquire()  # clean: near miss, leave_turn releases it
        self.depth += 1
        return self.depth

    def leave_turn(self) -> None:
        self.depth -= 1
        self._lock.release()


def read_ranges(turn: TurnLock, f: BinaryIO, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    out = []
    for start, n in ranges:
        turn.enter_turn()  # leak: a short read breaks out of the loop within the turn
        f.seek(start)
        blob = f.read(n)
        if len(blob) < n:
            break
        out.append(blob)
        turn.leave_turn()
    return out


@dataclass
class ShuffleBuffer:
    """Documents wait here with their shard in use."""

    table: ShardTable
    limit: int
    items: list[tuple[Mapped, int, int]] = field(default_factory=list)

    def offer(self, path: Path, start: int, stop: int) -> bool:
        shard = self.table.use(path)  # leak: a full buffer refuses the document and keeps the shard in use
        if len(self.items) >= self.limit:
            return False
        self.items.append((shard, start, stop))
        return True

    def draw(self, index: int) -> array:
        shard, start, stop = self.items.pop(index)
        tokens = shard.tokens(start, stop)
        self.table.disuse(shard)
        return tokens

    def offer_all(self, path: Path, bounds: Sequence[int]) -> int:
        n = 0
        for start, stop in zip(bounds, bounds[1:]):
            if len(self.items) >= self.limit:
                break
            shard = self.table.use(path)  # clean: near miss, in the items that draw and clear end
            self.items.append((shard, start, stop))
            n += 1
        return n

    def clear(self) -> None:
        while self.items:
            shard, _, _ = self.items.pop()
            self.table.disuse(shard)
