"""Data loading from packed shards: a pinned-entry cache of open shard handles, prefetching, and resume."""
from __future__ import annotations

import collections
import json
import logging
import os
import random
import struct
import threading
from typing import Callable, Iterator, Optional

import torch

log = logging.getLogger("data.shards")

HEADER = struct.Struct("<8sQQ")
MAGIC = b"PKSHARD1"


class Entry:
    def __init__(self, path: str) -> None:
        self.path = path
        self.file = open(path, "rb")  # clean: near miss, closed by the cache when it is evicted
        magic, self.count, self.index_at = HEADER.unpack(self.file.read(HEADER.size))
        self.valid = magic == MAGIC
        self.pins = 0
        self.offsets: Optional[list[int]] = None


class ShardCache:
    """At most `limit` open shards. An entry that is pinned is never closed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: "collections.OrderedDict[str, Entry]" = collections.OrderedDict()
        self._mu = threading.RLock()

    def pin(self, path: str) -> Entry:
        with self._mu:
            entry = self.entries.get(path)
            if entry is None:
                self._shrink()
                entry = self.entries[path] = Entry(path)  # clean: near miss, kept in entries, closed on evict
            self.entries.move_to_end(path)
            entry.pins += 1
            return entry

    def unpin(self, entry: Entry) -> None:
        with self._mu:
            entry.pins -= 1

    def _shrink(self) -> None:
        for path, entry in list(self.entries.items()):
            if len(self.entries) < self.limit:
                return
            if entry.pins == 0:
                entry.file.close()
                del self.entries[path]

    def clear(self) -> None:
        with self._mu:
            for entry in self.entries.values():
                entry.file.close()
            self.entries.clear()


class PinnedShard:
    """`with PinnedShard(cache, path) as entry`"""

    def __init__(self, cache: ShardCache, path: str) -> None:
        self.cache, self.path = cache, path
        self.entry: Optional[Entry] = None

    def __enter__(self) -> Entry:
        self.entry = self.cache.pin(self.path)  # clean: __exit__ unpins
        return self.entry

    def __exit__(self, *exc) -> bool:
        self.cache.unpin(self.entry)
        self.entry = None
        return False


class TimedShard:
    """Like PinnedShard, with reads counted into a statistics dict when there is one."""

    def __init__(self, cache: ShardCache, path: str, stats: Optional[dict] = None) -> None:
        self.cache, self.path, self.stats = cache, path, stats

    def __enter__(self) -> Entry:
        self.entry = self.cache.pin(self.path)  # leak: __exit__ without stats returns before unpin
        self.before = self.entry.file.tell()
        return self.entry

    def __exit__(self, *exc) -> bool:
        if self.stats is None:
            return False
        self.stats[self.path] = self.stats.get(self.path, 0) + self.entry.file.tell() - self.before
        self.cache.unpin(self.entry)
        return False


def load_offsets(entry: Entry) -> list[int]:
    if entry.offsets is None:
        entry.file.seek(entry.index_at)
        raw = entry.file.read(8 * entry.count)
        entry.offsets = list(struct.unpack(f"<{entry.count}Q", raw))
    return entry.offsets


def read_record(entry: Entry, i: int) -> bytes:
    entry.file.seek(load_offsets(entry)[i])
    (n,) = struct.unpack("<I", entry.file.read(4))
    return entry.file.read(n)


class ShardedDataset:
    def __init__(self, paths: list[str], cache: ShardCache, rank: int, world: int, decode: Callable) -> None:
        self.paths = paths[rank::world]
        self.cache = cache
        self.decode = decode
        self.rank = rank
        self.skipped: list[str] = []
        self.current: Optional[Entry] = None
        self.cursor = 0

    def sizes(self) -> dict[str, int]:
        out = {}
        for path in self.paths:
            entry = self.cache.pin(path)  # leak: an invalid shard is skipped while pinned
            if not entry.valid:
                self.skipped.append(path)
                continue
            out[path] = len(load_offsets(entry))
            self.cache.unpin(entry)
        return out

    def __iter__(self) -> Iterator:
        for path in self.paths:
            with PinnedShard(self.cache, path) as entry:  # clean: the manager unpins
                if not entry.valid:
                    continue
                order = list(range(entry.count))
                random.Random(path).shuffle(order)
                for i in order:
                    yield self.decode(read_record(entry, i))

    def mixed(self, weights: dict[str, float], rng: random.Random, total: int) -> Iterator:
        """Draw from several shards at once by weight."""
        held = {p: self.cache.pin(p) for p in weights}  # clean: near miss, finally unpins the whole dict
        try:
            names = list(held)
            for _ in range(total):
                name = rng.choices(names, [weights[n] for n in names])[0]
                entry = held[name]
                yield self.decode(read_record(entry, rng.randrange(entry.count)))
        finally:
            for entry in held.values():
                self.cache.unpin(entry)

    # stateful reading: one record at a time -------------------------------------------------------
    def seek(self, shard: int, record: int) -> None:
        if self.current is not None:
            self.cache.unpin(self.current)
        self.current = self.cache.pin(self.paths[shard])  # clean: near miss, the last one is unpinned first
        self.cursor = record

    def next_record(self) -> Optional[object]:
        if self.current is None or self.cursor >= self.current.count:
            return None
        record = read_record(self.current, self.cursor)
        self.cursor += 1
        return self.decode(record)

    def stop(self) -> None:
        if self.current is not None:
            self.cache.unpin(self.current)
            self.current = None

    def locate(self, key: int) -> Optional[Entry]:
        """The pinned shard that holds global record `key`."""
        seen = 0
        for path in self.paths:
            entry = self.cache.pin(path)  # clean: near miss, returned or unpinned each time round
            if key < seen + entry.count:
                return entry
            seen += entry.count
            self.cache.unpin(entry)
        return None

    def lengths_at(self, keys: list[int]) -> list[int]:
        out = []
        for key in keys:
            entry = self.locate(key)  # leak: the pin given by locate is never undone
            if entry is None:
                out.append(-1)
                continue
            out.append(len(read_record(entry, key % entry.count)))
        return out

class Resume:
    """The position in the data stream, saved next to the checkpoint."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.journal = open(path + ".journal", "a")  # clean: close() closes it

    def record(self, step: int, shard: int, cursor: int) -> None:
        self.journal.write(json.dumps([step, shard, cursor]) + "\n")

    def rotate(self) -> None:
        """Start a new journal; the old one is kept beside it."""
        self.journal.close()
        os.replace(self.path + ".journal", self.path + ".old")
        self.journal = open(self.path + ".journal", "a")  # clean: near miss, the new journal is close()'s

    def replay(self, upto: int) -> Optional[tuple[int, int]]:
        last = None
        src = open(self.path + ".journal")  # leak: the return inside the loop leaves it open
        for line in src:
            step, shard, cursor = json.loads(line)
            if step >= upto:
                return last
            last = (shard, cursor)
        src.close()
        return last

    def close(self) -> None:
        self.journal.close()


def collate(cache: ShardCache, wanted: list[tuple[str, int]], width: int) -> torch.Tensor:
    """Records of many shards as one padded byte tensor; each shard is pinned once."""
    out = torch.zeros(len(wanted), width, dtype=torch.uint8)
    pinned: dict[str, Entry] = {}
    for row, (path, i) in enumerate(wanted):
        if path not in pinned:
            pinned[path] = cache.pin(path)  # clean: near miss, all of pinned is unpinned below
        record = read_record(pinned[path], i)[:width]
        out[row, :len(record)] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    for entry in pinned.values():
        cache.unpin(entry)
    return out
