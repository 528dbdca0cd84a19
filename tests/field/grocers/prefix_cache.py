"""Prefix cache: counted blocks, radix nodes, matches held by requests."""
from __future__ import annotations

import hashlib
import heapq
import itertools
from typing import Dict, List, Optional, Tuple


class CountedBlocks:
    """Blocks with reference counts. new() starts at one or gives None."""

    def __init__(self, count: int):
        self._free = list(range(count))
        self._refs = [0] * count

    def new(self) -> Optional[int]:
        if not self._free:
            return None
        b = self._free.pop()
        self._refs[b] = 1
        return b

    def incref(self, b: int) -> int:
        self._refs[b] += 1
        return b

    def decref(self, b: int) -> None:
        self._refs[b] -= 1
        if self._refs[b] == 0:
            self._free.append(b)

    def count(self, b: int) -> int:
        return self._refs[b]


def block_hash(parent: bytes, tokens: Tuple[int, ...]) -> bytes:
    return hashlib.blake2b(parent + repr(tokens).encode(), digest_size=16).digest()


class HashCache:
    """The cache holds one reference on every block in its table."""

    def __init__(self, blocks: CountedBlocks):
        self.blocks = blocks
        self.table: Dict[bytes, int] = {}

    def publish(self, key: bytes, b: int) -> int:
        known = self.table.get(key)
        if known is not None:
            return known
        self.table[key] = self.blocks.incref(b)  # clean: near miss, only for an absent key, evict and clear decref
        return b

    def evict(self, key: bytes) -> None:
        b = self.table.pop(key, None)
        if b is not None:
            self.blocks.decref(b)

    def clear(self) -> None:
        for b in self.table.values():
            self.blocks.decref(b)
        self.table.clear()


class DraftCache(HashCache):
    """Table of the draft model, its blocks are always written anew."""

    def publish(self, key: bytes, b: int) -> int:
        self.table[key] = self.blocks.incref(b)  # leak: two requests publish the same prefix, the former reference is replaced (by meaning)
        return b


class Match:
    def __init__(self, blocks: CountedBlocks):
        self.blocks = blocks
        self.held: List[int] = []

    def release(self) -> None:
        while self.held:
            self.blocks.decref(self.held.pop())


class Matcher:
    def __init__(self, cache: HashCache, blocks: CountedBlocks, min_hits: int):
        self.cache = cache
        self.blocks = blocks
        self.min_hits = min_hits

    def match(self, chunks: List[Tuple[int, ...]]) -> Match:
        m = Match(self.blocks)
        key = b""
        for chunk in chunks:
            key = block_hash(key, chunk)
            b = self.cache.table.get(key)
            if b is None:
                break
            m.held.append(self.blocks.incref(b))  # clean: near miss, the break leaves it in the match which is returned
        return m

    def match_long(self, chunks: List[Tuple[int, ...]]) -> Optional[Match]:
        m = Match(self.blocks)
        key = b""
        for chunk in chunks:
            key = block_hash(key, chunk)
            b = self.cache.table.get(key)
            if b is None:
                break
            m.held.append(self.blocks.incref(b))  # leak: a match below min_hits gives None with references held
        if len(m.held) < self.min_hits:
            return None
        return m


class Sequence:
    """Blocks of one sequence: shared prefix then own blocks."""

    def __init__(self, blocks: CountedBlocks, matcher: Matcher):
        self.blocks = blocks
        self.matcher = matcher
        self.prefix: Optional[Match] = None
        self.own: List[int] = []

    def prefill(self, chunks: List[Tuple[int, ...]]) -> bool:
        self.prefix = self.matcher.match(chunks)  # leak: a full pool returns False, the next prefill replaces the match
        for _ in chunks[len(self.prefix.held):]:
            b = self.blocks.new()  # clean: on a full pool the own blocks are given back
            if b is None:
                self._drop_own()
                return False
            self.own.append(b)
        return True

    def _drop_own(self) -> None:
        for b in self.own:
            self.blocks.decref(b)
        self.own.clear()

    def copy_on_write(self, i: int) -> bool:
        old = self.own[i]
        if self.blocks.count(old) == 1:
            return True
        b = self.blocks.new()  # clean: takes the place of the shared one, which is decref'ed
        if b is None:
            return False
        self.own[i] = b
        self.blocks.decref(old)
        return True

    def fork(self) -> "Sequence":
        child = Sequence(self.blocks, self.matcher)
        child.own = [self.blocks.incref(b) for b in self.own]  # clean: the child's end gives them back
        return child

    def end(self) -> None:
        if self.prefix is not None:
            self.prefix.release()
            self.prefix = None
        self._drop_own()


def admit(waiting: List[Tuple[Sequence, List[Tuple[int, ...]]]]) -> List[Sequence]:
    started, again = [], []
    for seq, chunks in waiting:
        if seq.prefill(chunks):
            started.append(seq)
        else:
            again.append((seq, chunks))
    waiting[:] = again
    return started


class RadixNode:
    def __init__(self, block: int):
        self.block = block
        self.children: Dict[Tuple[int, ...], "RadixNode"] = {}
        self.stamp = 0


class RadixCache:
    def __init__(self, blocks: CountedBlocks):
        self.blocks = blocks
        self.roots: Dict[Tuple[int, ...], RadixNode] = {}
        self._tick = itertools.count(1)

    def insert(self, path: List[Tuple[Tuple[int, ...], int]]) -> None:
        level = self.roots
        for chunk, b in path:
            node = level.get(chunk)
            if node is None:
                node = level[chunk] = RadixNode(self.blocks.incref(b))  # leak: evict_root drops the children of a root with it
            node.stamp = next(self._tick)
            level = node.children

    def evict_root(self) -> bool:
        if not self.roots:
            return False
        oldest = min(self.roots, key=lambda c: self.roots[c].stamp)
        node = self.roots.pop(oldest)
        self.blocks.decref(node.block)
        return True


class LeafHeap:
    """Evicts leaves by age, pushes a block again when it is touched."""

    def __init__(self, blocks: CountedBlocks):
        self.blocks = blocks
        self.heap: List[Tuple[int, int]] = []
        self.stamp: Dict[int, int] = {}

    def touch(self, b: int, now: int) -> None:
        if b not in self.stamp:
            self.blocks.incref(b)  # clean: near miss, one reference per block in stamp though the heap has several entries
        self.stamp[b] = now
        heapq.heappush(self.heap, (now, b))

    def evict(self, n: int) -> int:
        done = 0
        while self.heap and done < n:
            at, b = heapq.heappop(self.heap)
            if self.stamp.get(b) != at:
                continue
            del self.stamp[b]
            self.blocks.decref(b)
            done += 1
        return done


class SystemPrompts:
    """Pinned prefixes by name; deploying a prompt anew retires the former."""

    def __init__(self, matcher: Matcher):
        self.matcher = matcher
        self.pinned: Dict[str, Match] = {}

    def deploy(self, name: str, chunks: List[Tuple[int, ...]]) -> None:
        m = self.matcher.match(chunks)  # clean: near miss, the replaced match is released
        old = self.pinned.get(name)
        self.pinned[name] = m
        if old is not None:
            old.release()

    def rename(self, old: str, new: str) -> None:
        if new in self.pinned or old not in self.pinned:
            return
        self.pinned[new] = self.pinned.pop(old)

    def deploy_long(self, name: str, chunks: List[Tuple[int, ...]]) -> bool:
        m = self.matcher.match_long(chunks)  # leak: an already pinned name returns without release of the new match
        if m is None:
            return False
        if name in self.pinned:
            return False
        self.pinned[name] = m
        return True

    def retire(self, name: str) -> None:
        m = self.pinned.pop(name, None)
        if m is not None:
            m.release()
