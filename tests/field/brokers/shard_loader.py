"""Streams safetensors-like shards through a host arena into model parameters."""
from __future__ import annotations

import json
import logging
import mmap
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

import torch

logger = logging.getLogger(__name__)


@dataclass
class Shard:
    path: Path
    fd: int
    mm: mmap.mmap
    header: dict[str, Any] = field(default_factory=dict)


class ShardFiles:
    """Keeps the number of open shards under a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open_count = 0

    def open_shard(self, path: Path) -> Shard | None:
        if self.open_count >= self.limit:
            return None
        self.open_count += 1
        fd = os.open(path, os.O_RDONLY)  # clean: kept in the Shard and closed by close_shard
        return Shard(path, fd, mmap.mmap(fd, 0, access=mmap.ACCESS_READ))  # clean: the Shard owns it, close_shard closes it

    def close_shard(self, shard: Shard) -> None:
        shard.mm.close()
        os.close(shard.fd)
        self.open_count -= 1


@dataclass(frozen=True)
class Span:
    start: int
    size: int


class HostArena:
    def __init__(self, size: int) -> None:
        self.data = torch.empty(size, dtype=torch.uint8)
        self._spans: list[Span] = [Span(0, size)]

    def reserve(self, n: int) -> Span | None:
        for i, s in enumerate(self._spans):
            if s.size >= n:
                self._spans[i] = Span(s.start + n, s.size - n)
                return Span(s.start, n)
        return None

    def cancel(self, span: Span) -> None:
        self._spans.append(span)


def read_header(shard: Shard) -> dict[str, Any] | None:
    n = int.from_bytes(shard.mm[:8], "little")
    try:
        shard.header = json.loads(shard.mm[8 : 8 + n])
    except ValueError:
        return None
    return shard.header


class ShardLoader:
    def __init__(self, files: ShardFiles, arena: HostArena) -> None:
        self.files = files
        self.arena = arena
        self.cached: dict[str, Shard] = {}
        self.staged: list[tuple[str, Span]] = []

    def index(self, paths: list[Path]) -> dict[str, Path]:
        table: dict[str, Path] = {}
        for path in paths:
            shard = self.files.open_shard(path)  # leak: a broken header continues with the next file, this one stays open
            if shard is None:
                break
            header = read_header(shard)
            if header is None:
                logger.warning("bad header in %s", path)
                continue
            table.update(dict.fromkeys(header, path))
            self.files.close_shard(shard)
        return table

    def count(self, path: Path) -> int:
        shard = self.files.open_shard(path)  # clean: near miss, closed in the finally also for a broken header
        if shard is None:
            return 0
        try:
            header = read_header(shard)
            if header is None:
                return 0
            return len(header)
        finally:
            self.files.close_shard(shard)

    @contextmanager
    def opened(self, path: Path) -> Iterator[Shard | None]:
        shard = self.files.open_shard(path)  # clean: near miss, the generator closes it unless there is none
        if shard is None:
            yield None
            return
        try:
            yield shard
        finally:
            self.files.close_shard(shard)

    def get(self, path: Path) -> Shard | None:
        key = str(path)
        if key not in self.cached:
            shard = self.files.open_shard(path)  # clean: near miss, kept in cached and closed by close
            if shard is None:
                return None
            self.cached[key] = shard
        return self.cached[key]

    def reopen(self, path: Path) -> bool:
        shard = self.files.open_shard(path)  # leak: takes the place of a cached shard that nobody closes
        if shard is None:
            return False
        read_header(shard)
        self.cached[str(path)] = shard
        return True

    def tensors(self, path: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
        shard = self.files.open_shard(path)  # leak: a missing name ends the generator without closing
        if shard is None:
            return
        header = read_header(shard) or {}
        for name in names:
            if name not in header:
                return
            lo, hi = header[name]["data_offsets"]
            yield name, shard.mm[lo:hi]
        self.files.close_shard(shard)

    def stage(self, name: str, raw: bytes) -> bool:
        span = self.arena.reserve(len(raw))  # clean: near miss, put on the staged list which flush cancels
        if span is None:
            return False
        self.arena.data[span.start : span.start + span.size] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self.staged.append((name, span))
        return True

    def flush(self, params: dict[str, torch.Tensor]) -> int:
        done = 0
        for name, span in self.staged:
            if name in params:
                params[name].copy_(self.arena.data[span.start : span.start + span.size])
                done += 1
            self.arena.cancel(span)
        self.staged.clear()
        return done

    def convert(self, raw: bytes, scale: bytes) -> torch.Tensor | None:
        a = self.arena.reserve(len(raw))  # leak: stays reserved when the scale does not fit
        b = self.arena.reserve(len(scale))  # leak: stays reserved when only the weight does not fit
        if a is None or b is None:
            return None
        self.arena.data[a.start : a.start + a.size] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        out = self.arena.data[a.start : a.start + a.size].float() * len(scale)
        self.arena.cancel(a)
        self.arena.cancel(b)
        return out

    def convert_tiles(self, raw: bytes, tile: int) -> list[float]:
        sums: list[float] = []
        for lo in range(0, len(raw), tile):
            span = self.arena.reserve(min(tile, len(raw) - lo))  # clean: near miss, cancelled in each turn before the break can run
            if span is None:
                break
            sums.append(float(span.size))
            self.arena.cancel(span)
            if len(sums) >= 64:
                break
        return sums

    def close(self) -> None:
        for shard in self.cached.values():
            self.files.close_shard(shard)
        self.cached.clear()


def load(loader: ShardLoader, paths: list[Path], params: dict[str, torch.Tensor]) -> int:
    table = loader.index(paths)
    with ExitStack() as stack:
        stack.callback(loader.close)
        for path in sorted(set(table.values())):
            with loader.opened(path) as shard:  # clean: near miss, the with closes it although the loop continues
                if shard is None or not read_header(shard):
                    continue
                for name, meta in shard.header.items():
                    lo, hi = meta["data_offsets"]
                    if not loader.stage(name, shard.mm[lo:hi]):
                        loader.flush(params)
                        loader.stage(name, shard.mm[lo:hi])
        return loader.flush(params)
