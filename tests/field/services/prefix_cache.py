"""Prefix cache with ref-counted blocks and LRU eviction."""
from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Sequence

logger = logging.getLogger(__name__)


@dataclass
class Block:
    bid: int
    ref: int = 0
    key: bytes | None = None


@dataclass
class Sequence_:
    rid: str
    tokens: list[int]
    table: list[Block] = field(default_factory=list)


class PrefixCache:
    def __init__(self, n: int, block_size: int) -> None:
        self.bs = block_size
        self.free = [Block(i) for i in range(n)]
        self.cached: OrderedDict[bytes, Block] = OrderedDict()

    def key_of(self, tokens: Sequence[int]) -> bytes:
        return hashlib.blake2b(repr(tuple(tokens)).encode(), digest_size=8).digest()

    def take_block(self) -> Block | None:
        if not self.free and not self.evict(1):
            return None
        b = self.free.pop()  # clean: handed out with one reference
        b.ref = 1
        return b

    def incref(self, b: Block) -> Block:
        b.ref += 1
        return b

    def decref(self, b: Block) -> None:
        b.ref -= 1
        if b.ref == 0 and b.key is None:
            self.free.append(b)

    def lookup(self, key: bytes) -> Block | None:
        b = self.cached.get(key)
        if b is None:
            return None
        self.cached.move_to_end(key)
        return self.incref(b)  # clean: the reference is handed to the caller

    def evict(self, n: int) -> int:
        done = 0
        for key in list(self.cached):
            if done == n:
                break
            b = self.cached.pop(key)  # clean: near miss, a block in use goes back under its key, an idle one to the free list
            if b.ref > 0:
                self.cached[key] = b
                continue
            b.key = None
            self.free.append(b)
            done += 1
        return done

    def evict_oldest(self) -> bool:
        if not self.cached:
            return False
        _, b = self.cached.popitem(last=False)  # leak: a block in use leaves the cache with its key set, so decref never frees it
        if b.ref > 0:
            return False
        b.key = None
        self.free.append(b)
        return True

    def publish(self, b: Block, key: bytes) -> None:
        if key not in self.cached:
            b.key = key
            self.cached[key] = b


class Manager:
    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.seqs: dict[str, Sequence_] = {}

    def start(self, seq: Sequence_) -> bool:
        bs = self.cache.bs
        for i in range(0, len(seq.tokens), bs):
            key = self.cache.key_of(seq.tokens[: i + bs])
            b = self.cache.lookup(key)  # clean: into the table, finish() drops every reference
            if b is None:
                b = self.cache.take_block()  # clean: near miss, a shortage rolls back the table through finish()
                if b is None:
                    self.finish(seq)
                    return False
                self.cache.publish(b, key)
            seq.table.append(b)
        self.seqs[seq.rid] = seq
        return True

    def finish(self, seq: Sequence_) -> None:
        while seq.table:
            self.cache.decref(seq.table.pop())
        self.seqs.pop(seq.rid, None)

    def fork(self, parent: Sequence_, rid: str) -> Sequence_:
        child = Sequence_(rid, list(parent.tokens))
        for b in parent.table:
            child.table.append(self.cache.incref(b))  # clean: in the child's table
        self.seqs[rid] = child
        return child

    def grow(self, seq: Sequence_) -> bool:
        b = self.cache.take_block()  # clean: None or appended
        if b is None:
            return False
        seq.table.append(b)
        return True

    def copy_on_write(self, seq: Sequence_) -> bool:
        last = seq.table[-1]
        if last.ref == 1:
            return True
        fresh = self.cache.take_block()  # clean: near miss, the shared block is dereferenced before its place is overwritten
        if fresh is None:
            return False
        self.cache.decref(last)
        seq.table[-1] = fresh
        return True

    def truncate(self, seq: Sequence_, keep: int) -> None:
        for b in seq.table[keep:]:
            self.cache.decref(b)
        del seq.table[keep:]

    def hit_length(self, tokens: Sequence[int]) -> int:
        n = 0
        for i in range(0, len(tokens), self.cache.bs):
            b = self.cache.lookup(self.cache.key_of(tokens[: i + self.cache.bs]))  # leak: references taken for counting are never dropped
            if b is None:
                break
            n += self.cache.bs
        return n

    def is_cached(self, tokens: Sequence[int]) -> bool:
        b = self.cache.lookup(self.cache.key_of(tokens))  # clean: dropped again
        if b is None:
            return False
        self.cache.decref(b)
        return True

    def reserve_tail(self, seq: Sequence_, n: int) -> bool:
        tail: list[Block] = []
        for _ in range(n):
            b = self.cache.take_block()  # leak: running short returns False, the blocks in tail are lost
            if b is None:
                logger.debug("%s: no tail", seq.rid)
                return False
            tail.append(b)
        seq.table.extend(tail)
        return True

    def restart(self, seq: Sequence_) -> bool:
        self.truncate(seq, 0)
        return self.grow(seq)  # clean: near miss, the table was dereferenced before; the new block is in it

    def adopt(self, seq: Sequence_, other: Sequence_) -> None:
        blocks = [self.cache.incref(b) for b in other.table]  # leak: blocks beyond the adopted length keep the extra reference
        n = len(seq.tokens) // self.cache.bs
        seq.table.extend(blocks[:n])

    def swap_last(self, seq: Sequence_) -> bool:
        fresh = self.cache.take_block()  # leak: an empty table returns with the fresh block
        if fresh is None or not seq.table:
            return False
        self.cache.decref(seq.table.pop())
        seq.table.append(fresh)
        return True
