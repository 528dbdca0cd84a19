"""Indexed token shards: a cache of open files with pins, and samplers that read documents through it."""
from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple

HEADER = struct.Struct("<8sQ")
MAGIC = b"TOKSHARD"


@dataclass
class OpenShard:
    path: Path
    fh: BinaryIO
    offsets: Tuple[int, ...]
    pins: int = 0

    def document(self, i: int) -> bytes:
        self.fh.seek(self.offsets[i])
        return self.fh.read(self.offsets[i + 1] - self.offsets[i])

    def __len__(self) -> int:
        return len(self.offsets) - 1


def read_offsets(fh: BinaryIO) -> Optional[Tuple[int, ...]]:
    magic, count = HEADER.unpack(fh.read(HEADER.size))
    if magic != MAGIC:
        return None
    return struct.unpack(f"<{count + 1}Q", fh.read(8 * (count + 1)))


class ShardCache:
    """Open shards, least recently used first; only shards without pins are closed."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._shards: "OrderedDict[Path, OpenShard]" = OrderedDict()

    def pin(self, path: Path) -> Optional[OpenShard]:
        """The shard with one more pin, or None for a file that is not one."""
        shard = self._shards.get(path)
        if shard is None:
            fh = open(path, "rb")  # leak: not closed when the magic is wrong
            offsets = read_offsets(fh)
            if offsets is None:
                return None
            shard = OpenShard(path, fh, offsets)
            self._shards[path] = shard
            self._evict()
        self._shards.move_to_end(path)
        shard.pins += 1
        return shard

    def unpin(self, shard: OpenShard) -> None:
        shard.pins -= 1
        self._evict()

    def _evict(self) -> None:
        excess = len(self._shards) - self.capacity
        for path in list(self._shards)[:-1]:
            if excess <= 0:
                break
            shard = self._shards[path]
            if shard.pins == 0:
                shard.fh.close()
                del self._shards[path]
                excess -= 1

    def close(self) -> None:
        for shard in self._shards.values():
            shard.fh.close()
        self._shards.clear()


class PinnedShard:
    """Context manager around pin and unpin."""

    def __init__(self, cache: ShardCache, path: Path):
        self.cache = cache
        self.path = path
        self.shard: Optional[OpenShard] = None

    def __enter__(self) -> Optional[OpenShard]:
        self.shard = self.cache.pin(self.path)  # clean: __exit__ unpins what is not None
        return self.shard

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.shard is not None:
            self.cache.unpin(self.shard)
            self.shard = None
        return exc_type is IndexError


def documents(cache: ShardCache, paths: List[Path]) -> Iterator[bytes]:
    for path in paths:
        with PinnedShard(cache, path) as shard:  # clean: unpinned by the context manager, also on continue
            if shard is None:
                continue
            for i in range(len(shard)):
                yield shard.document(i)


def packed(cache: ShardCache, paths: List[Path], width: int, limit: int) -> Iterator[bytes]:
    """Fixed-width rows across documents and shards, at most `limit` rows."""
    rest, made = b"", 0
    for path in paths:
        shard = cache.pin(path)  # leak: reaching the limit returns before unpin
        if shard is None:
            continue
        for i in range(len(shard)):
            rest += shard.document(i)
            while len(rest) >= width:
                yield rest[:width]
                rest = rest[width:]
                made += 1
                if made == limit:
                    return
        cache.unpin(shard)


class Mixture:
    """Documents from several sources in turn; a source pins the shard that it is in."""

    def __init__(self, cache: ShardCache, sources: Dict[str, List[Path]]):
        self.cache = cache
        self.sources = {name: list(paths) for name, paths in sources.items()}
        self._current: Dict[str, Tuple[OpenShard, int]] = {}
        self._lookahead: Dict[str, OpenShard] = {}

    def _advance(self, name: str) -> bool:
        done = self._current.pop(name, None)
        if done is not None:
            self.cache.unpin(done[0])
        while self.sources[name]:
            shard = self.cache.pin(self.sources[name].pop(0))  # clean: in _current, unpinned by close
            if shard is not None:
                self._current[name] = (shard, 0)
                return True
        return False

    def next_document(self, name: str) -> Optional[bytes]:
        entry = self._current.get(name)
        if entry is None or entry[1] >= len(entry[0]):
            if not self._advance(name):
                return None
            entry = self._current[name]
        shard, i = entry
        self._current[name] = (shard, i + 1)
        return shard.document(i) if i < len(shard) else b""

    def look_ahead(self, name: str) -> None:
        if name in self._lookahead or not self.sources[name]:
            return
        shard = self.cache.pin(self.sources[name][0])  # leak: close clears _lookahead without unpin
        if shard is not None:
            self._lookahead[name] = shard

    def close(self) -> None:
        for shard, _ in self._current.values():
            self.cache.unpin(shard)
        self._current.clear()
        self._lookahead.clear()


def longest_document(cache: ShardCache, paths: List[Path]) -> Tuple[int, Optional[bytes]]:
    best, holder, where = -1, None, -1
    for path in paths:
        shard = cache.pin(path)  # leak: a better shard takes the place of the holder, which stays pinned
        if shard is None:
            continue
        sizes = [b - a for a, b in zip(shard.offsets, shard.offsets[1:])]
        if sizes and max(sizes) > best:
            best = max(sizes)
            holder, where = shard, sizes.index(best)
        else:
            cache.unpin(shard)
    if holder is None:
        return -1, None
    doc = holder.document(where)
    cache.unpin(holder)
    return best, doc


def shortest_shard(cache: ShardCache, paths: List[Path]) -> Optional[int]:
    holder = None
    for path in paths:
        shard = cache.pin(path)  # clean: near miss, the loser of each turn is unpinned, then the winner
        if shard is None:
            continue
        if holder is None or len(shard) < len(holder):
            shard, holder = holder, shard
        if shard is not None:
            cache.unpin(shard)
    if holder is None:
        return None
    count = len(holder)
    cache.unpin(holder)
    return count


def copy_prefix(cache: ShardCache, src: Path, dst: Path, count: int) -> int:
    shard = cache.pin(src)  # clean: None or unpinned
    if shard is None:
        return 0
    out = open(dst, "wb")  # leak: an empty document returns without close
    written = 0
    for i in range(min(count, len(shard))):
        doc = shard.document(i)
        if not doc:
            cache.unpin(shard)
            return written
        written += out.write(doc)
    out.close()
    cache.unpin(shard)
    return written
