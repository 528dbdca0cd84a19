"""Loads sharded weights: open shard files are limited and reference counted."""
from __future__ import annotations

import io
import json
import logging
import os
import struct
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any, Iterator

import torch

logger = logging.getLogger(__name__)

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(eq=False)
class Shard:
    path: str
    fh: IO[bytes]
    header: dict[str, Any]
    base: int
    refs: int = field(default=0)

    def tensor(self, name: str) -> torch.Tensor | None:
        meta = self.header.get(name)
        if meta is None:
            return None
        lo, hi = meta["data_offsets"]
        self.fh.seek(self.base + lo)
        raw = bytearray(self.fh.read(hi - lo))
        return torch.frombuffer(raw, dtype=DTYPES[meta["dtype"]]).reshape(meta["shape"])


class HandleTable:
    """Open files, limited so that a load does not run into the ulimit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open_files: set[int] = set()

    def open(self, path: str) -> IO[bytes] | None:
        if len(self.open_files) >= self.limit or not os.path.exists(path):
            return None
        fh = io.open(path, "rb")
        self.open_files.add(fh.fileno())
        return fh

    def close(self, fh: IO[bytes]) -> None:
        self.open_files.discard(fh.fileno())
        fh.close()


class ShardCache:
    """acquire/release by path; a shard is closed with its last release."""

    def __init__(self, root: str, max_open: int = 64) -> None:
        self.root = root
        self.handles = HandleTable(max_open)
        self._shards: dict[str, Shard] = {}

    def acquire(self, name: str) -> Shard | None:
        shard = self._shards.get(name)
        if shard is None:
            shard = self._open_shard(os.path.join(self.root, name))  # clean: kept in _shards, closed by release
            if shard is None:
                return None
            self._shards[name] = shard
        shard.refs += 1
        return shard

    def _open_shard(self, path: str) -> Shard | None:
        fh = self.handles.open(path)  # leak: not closed when the file is truncated
        if fh is None:
            return None
        (n,) = struct.unpack("<Q", fh.read(8))
        if n > os.path.getsize(path) - 8:
            logger.error("%s is truncated", path)
            return None
        return Shard(path, fh, json.loads(fh.read(n)), 8 + n)

    def header_size(self, name: str) -> int:
        fh = self.handles.open(os.path.join(self.root, name))  # clean: near miss, closed by finally on the short file too
        if fh is None:
            return -1
        try:
            raw = fh.read(8)
            if len(raw) < 8:
                return -1
            return struct.unpack("<Q", raw)[0]
        finally:
            self.handles.close(fh)

    def release(self, shard: Shard) -> None:
        shard.refs -= 1
        if shard.refs == 0:
            del self._shards[os.path.basename(shard.path)]
            self.handles.close(shard.fh)


class WeightIterator:
    def __init__(self, cache: ShardCache, index: dict[str, str]) -> None:
        self.cache = cache
        self.index = index
        self.current: Shard | None = None

    def __enter__(self) -> "WeightIterator":
        return self

    def switch(self, name: str) -> bool:
        if self.current is not None:
            if os.path.basename(self.current.path) == name:
                return True
            self.cache.release(self.current)
            self.current = None
        self.current = self.cache.acquire(name)  # leak: __exit__ returns early upon a KeyError and keeps the current shard
        return self.current is not None

    def get(self, weight: str) -> torch.Tensor | None:
        if not self.switch(self.index[weight]):
            return None
        assert self.current is not None
        return self.current.tensor(weight)

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: object) -> bool:
        if exc_type is not None and issubclass(exc_type, KeyError):
            logger.warning("weight %s is not in the index", exc)
            return True
        if self.current is not None:
            self.cache.release(self.current)
            self.current = None
        return False


def find_weight(cache: ShardCache, shards: list[str], weight: str) -> torch.Tensor | None:
    for name in shards:
        shard = cache.acquire(name)  # leak: released only where the weight is found
        if shard is None:
            continue
        t = shard.tensor(weight)
        if t is not None:
            cache.release(shard)
            return t
    return None


def load_all(cache: ShardCache, shards: list[str]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name in shards:
        shard = cache.acquire(name)  # clean: near miss, the `continue` comes after the release
        if shard is None:
            raise FileNotFoundError(name)
        names = [k for k in shard.header if k != "__metadata__"]
        loaded = {k: shard.tensor(k) for k in names}
        cache.release(shard)
        if not loaded:
            continue
        out.update({k: v for k, v in loaded.items() if v is not None})
    return out


def merge_pair(cache: ShardCache, a: str, b: str, weight: str) -> torch.Tensor | None:
    with ExitStack() as stack:
        left = cache.acquire(a)  # clean: near miss, the stack releases it also when the second is missing
        if left is None:
            return None
        stack.callback(cache.release, left)
        right = cache.acquire(b)  # clean: released by the stack
        if right is None:
            return None
        stack.callback(cache.release, right)
        x, y = left.tensor(weight), right.tensor(weight)
        return None if x is None or y is None else torch.cat((x, y))


def same_shape(cache: ShardCache, a: str, b: str, weight: str) -> bool:
    left = cache.acquire(a)  # leak: not released when b is missing
    if left is None:
        return False
    right = cache.acquire(b)  # clean: released below, or None
    if right is None:
        return False
    x, y = left.tensor(weight), right.tensor(weight)
    cache.release(left)
    cache.release(right)
    return x is not None and y is not None and x.shape == y.shape


def stream_weights(cache: ShardCache, shards: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in shards:
        shard = cache.acquire(name)  # clean: near miss, finally releases it also when the consumer stops
        if shard is None:
            continue
        try:
            for key in shard.header:
                t = shard.tensor(key) if key != "__metadata__" else None
                if t is not None:
                    yield key, t
        finally:
            cache.release(shard)


def load_subset(cache: ShardCache, index: dict[str, str], wanted: list[str]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    with WeightIterator(cache, index) as it:
        for w in wanted:
            t = it.get(w)
            if t is not None:
                out[w] = t
    return out
