import logging

from .handles import HandleTable
from .reader import PairReader, ShardReader, open_many, open_some

log = logging.getLogger(__name__)


def fetch_all(table: HandleTable, root: str, shards) -> list:
    handles = open_many(table, root, shards)  # clean: closed in the finally
    if handles is None:
        return []
    try:
        return [h.read(64) for h in handles]
    finally:
        for h in handles:
            table.close_shard(h)


def fetch_until(table: HandleTable, root: str, shards, marker: bytes) -> bytes:
    handles = open_many(table, root, shards)  # leak: the hit returns with the remaining handles open
    if handles is None:
        return b""
    for h in handles:
        data = h.read(64)
        table.close_shard(h)
        if marker in data:
            return data
    return b""


def fetch_map(table: HandleTable, root: str, shards) -> dict:
    opened = open_some(table, root, shards)  # clean: emptied and closed one by one
    out = {}
    while opened:
        s, h = opened.popitem()
        out[s] = h.read(16)
        table.close_shard(h)
    return out


def sizes(table: HandleTable, root: str, shards) -> int:
    opened = open_some(table, root, shards)  # leak: the map is cleared, its handles stay open
    total = sum(h.size() for h in opened.values())
    opened.clear()
    return total


def compare(table: HandleTable, root: str, a: int, b: int) -> bool:
    pair = PairReader(table, root, a, b)
    same = pair.left.read(64) == pair.right.read(64)
    pair.close()
    return same


def scan(table: HandleTable, root: str, n: int) -> int:
    hits = 0
    with ShardReader(table, root) as r:
        for s in range(n):
            if not r.seek(s):
                log.warning("shard %d is not available", s)
                continue
            hits += len(r.current.read(8))
    return hits


def head(table: HandleTable, root: str, shard: int) -> bytes:
    with table.reading(shard, root) as h:  # clean: context manager
        if h is None:
            return b""
        return h.read(8)


def head_plain(table: HandleTable, root: str, shard: int) -> bytes:
    h = table.open_shard(shard, root)  # leak: a short read returns without close_shard
    if h is None:
        return b""
    data = h.read(8)
    if len(data) < 8 or data[0] == 0:
        return b""
    table.close_shard(h)
    return data
