"""Loads checkpoint shards into regions of one preallocated arena (plain functions)."""
import logging
import mmap
import os
import struct
import zlib
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

log = logging.getLogger("arena")

ALIGN = 256
MIN_SPLIT = 4096
MAGIC = b"WSH1"
HEADER = struct.Struct("<4sQI")


class ArenaFull(MemoryError):
    pass


class BadShard(ValueError):
    pass


class LoadError(RuntimeError):
    pass


@dataclass
class Arena:
    mem: np.ndarray
    free: list = field(default_factory=list)
    cache: OrderedDict = field(default_factory=OrderedDict)
    cache_limit: int = 8


class Region(NamedTuple):
    arena: Arena
    start: int
    size: int
    owner: bool = True


def make_arena(nbytes):
    return Arena(np.zeros(nbytes, np.uint8), [(0, nbytes)])


def align(n):
    return (n + ALIGN - 1) // ALIGN * ALIGN


def carve(arena, nbytes):
    need = align(nbytes)
    for i, (start, size) in enumerate(arena.free):
        if size < need:
            continue
        start, size = arena.free.pop(i)  # leak: a rest below MIN_SPLIT is neither put back nor part of the region
        rest = size - need
        if rest >= MIN_SPLIT:
            arena.free.insert(i, (start + need, rest))
        return Region(arena, start, need)
    raise ArenaFull(f"{nbytes} bytes")


def mend(region):
    if not region.owner:
        return
    spans = sorted(region.arena.free + [(region.start, region.size)])
    merged = [spans[0]]
    for start, size in spans[1:]:
        last, n = merged[-1]
        if last + n == start:
            merged[-1] = (last, n + size)
        else:
            merged.append((start, size))
    region.arena.free[:] = merged


def mem(region):
    return region.arena.mem[region.start:region.start + region.size]


def view(region, offset, nbytes):
    """A part of a region. Views own nothing."""
    return Region(region.arena, region.start + offset, nbytes, owner=False)


@contextmanager
def scratch(arena, nbytes):
    region = carve(arena, nbytes)  # clean: mended in the finally
    try:
        yield mem(region)
    finally:
        mend(region)


# ---- files ---------------------------------------------------------------

def map_file(path):
    fd = os.open(path, os.O_RDONLY)  # clean: near miss, the mapping has its own reference and the finally closes this one
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return None
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)  # clean: handed to the caller
    finally:
        os.close(fd)


def peek(path):
    """(payload bytes, crc) of a shard, None when it is not one."""
    mm = map_file(path)  # leak: a file with another magic returns before the close
    if mm is None:
        return None
    magic, nbytes, crc = HEADER.unpack(mm[:HEADER.size])
    if magic != MAGIC:
        log.info("%s is no shard", path)
        return None
    mm.close()
    return nbytes, crc


def read_shard(arena, path):
    with open(path, "rb") as fh:  # clean: closed with the block
        magic, nbytes, crc = HEADER.unpack(fh.read(HEADER.size))
        if magic != MAGIC:
            raise BadShard(path)
        region = carve(arena, nbytes)  # leak: a wrong checksum raises BadShard with the region carved
        fh.readinto(mem(region)[:nbytes])
    if zlib.crc32(mem(region)[:nbytes]) != crc:
        raise BadShard(f"{path}: checksum")
    return region


def load_checkpoint(arena, paths, strict=True):
    table, failed = {}, []
    for path in paths:
        name = os.path.splitext(os.path.basename(path))[0]
        try:
            table[name] = read_shard(arena, path)  # leak: in strict mode LoadError throws the whole table away
        except BadShard as exc:
            log.warning("%s", exc)
            failed.append(path)
    if failed and strict:
        raise LoadError(f"{len(failed)} of {len(paths)} shards are bad")
    return table


def unload(table):
    for region in table.values():
        mend(region)
    table.clear()


def tie(table, name, other):
    """Lets name use the memory of other, e.g. lm_head and embed_tokens."""
    old = table[name]
    table[name] = view(table[other], 0, table[other].size)
    mend(old)


def init_missing(arena, table, spec):
    for name, nbytes in spec.items():
        if name in table:
            continue
        table[name] = carve(arena, nbytes)  # clean: names that are present were skipped, unload() mends it
        mem(table[name])[:] = 0


def quantize(arena, table, name):
    old = table[name]
    try:
        small = carve(arena, old.size // 4)  # clean: near miss, replaces the old one in the table, and the old one is mended
    except ArenaFull:
        log.info("no room to quantize %s", name)
        return False
    mem(small)[:] = mem(old)[: small.size * 4: 4][: small.size]
    table[name] = small
    mend(old)
    return True


def transposed(arena, region, rows, cols):
    out = carve(arena, region.size)  # clean: returned
    src = mem(region)[: rows * cols].reshape(rows, cols)
    mem(out)[: rows * cols] = src.T.reshape(-1)
    return out


def load_transposed(arena, path, rows, cols):
    region = read_shard(arena, path)  # leak: rebound to the copy on the next line
    region = transposed(arena, region, rows, cols)  # clean: returned
    return region


def windows(arena, paths):
    for path in paths:
        try:
            region = read_shard(arena, path)  # leak: not mended when the consumer stops early, as find_shard() does
        except BadShard:
            continue
        yield path, mem(region)
        mend(region)


def find_shard(arena, paths, byte):
    for path, data in windows(arena, paths):
        if (data == byte).any():
            return path
    return None


def cached(arena, path):
    """Memory of a shard, valid until cache_limit other shards were asked for."""
    if path in arena.cache:
        arena.cache.move_to_end(path)
        return mem(arena.cache[path])
    while len(arena.cache) >= arena.cache_limit:
        _, old = arena.cache.popitem(last=False)
        mend(old)
    arena.cache[path] = read_shard(arena, path)  # clean: near miss, in the cache until it is evicted above
    return mem(arena.cache[path])


def average(arena, table, names):
    size = min(table[n].size for n in names)
    with scratch(arena, size * 4) as tmp:  # clean: left with the block
        acc = tmp[: size * 4].view(np.float32)
        acc[:] = 0
        for n in names:
            acc += mem(table[n])[:size]
        return acc / len(names)
