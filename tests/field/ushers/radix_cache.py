"""Radix prefix cache with locked paths over a token-slot allocator."""
from __future__ import annotations

import heapq
import logging
import time
from dataclasses import dataclass, field
from typing import Optional, Sequence

logger = logging.getLogger(__name__)


class TokenSlots:
    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)


@dataclass(eq=False)
class RadixNode:
    key: tuple[int, ...] = ()
    value: list[int] = field(default_factory=list)
    parent: Optional["RadixNode"] = None
    children: dict[int, "RadixNode"] = field(default_factory=dict)
    lock_ref: int = 0
    last_access: float = field(default_factory=time.monotonic)


@dataclass
class Match:
    node: RadixNode
    slots: list[int]

    @property
    def length(self) -> int:
        return len(self.slots)


@dataclass
class Seq:
    tokens: list[int]
    match: Optional[Match] = None
    own: list[int] = field(default_factory=list)


class RadixCache:
    def __init__(self, slots: TokenSlots) -> None:
        self.slots = slots
        self.root = RadixNode()

    def lock(self, node: RadixNode) -> None:
        while node is not self.root:
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        while node is not self.root:
            node.lock_ref -= 1
            node = node.parent

    def match_and_lock(self, tokens: Sequence[int]) -> Match:
        node, slots, i = self.root, [], 0
        while i < len(tokens):
            child = node.children.get(tokens[i])
            if child is None or tuple(tokens[i : i + len(child.key)]) != child.key:
                break
            slots.extend(child.value)
            i += len(child.key)
            node = child
            node.last_access = time.monotonic()
        self.lock(node)  # clean: handed to the caller in the match
        return Match(node, slots)

    def insert(self, parent: RadixNode, key: Sequence[int], value: list[int]) -> bool:
        if not key or key[0] in parent.children:
            return False
        parent.children[key[0]] = RadixNode(tuple(key), value, parent)
        return True

    def evict(self, want: int) -> int:
        leaves = [(n.last_access, id(n), n) for n in self._leaves() if n.lock_ref == 0]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < want:
            _, _, node = heapq.heappop(leaves)
            self.slots.free(node.value)
            freed += len(node.value)
            del node.parent.children[node.key[0]]
        return freed

    def _leaves(self) -> list[RadixNode]:
        out, stack = [], list(self.root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                out.append(node)
        return out


class PrefixScheduler:
    def __init__(self, cache: RadixCache, slots: TokenSlots, runner) -> None:
        self.cache = cache
        self.slots = slots
        self.runner = runner
        self._sticky: dict[str, Match] = {}

    def _alloc_or_evict(self, n: int) -> Optional[list[int]]:
        got = self.slots.alloc(n)  # clean: handed to the caller
        if got is None:
            self.cache.evict(n - self.slots.available())
            got = self.slots.alloc(n)  # clean: near miss, only where the first gave none
        return got

    def admit(self, seq: Seq) -> bool:
        match = self.cache.match_and_lock(seq.tokens)  # leak: the path stays locked when slots are short
        own = self._alloc_or_evict(len(seq.tokens) - match.length)  # clean: moved into seq.own
        if own is None:
            return False
        seq.match, seq.own = match, own
        return True

    def readmit(self, seq: Seq) -> bool:
        match = self.cache.match_and_lock(seq.tokens)  # clean: near miss, unlocked when slots are short
        own = self._alloc_or_evict(len(seq.tokens) - match.length)  # clean: moved into seq.own
        if own is None:
            self.cache.unlock(match.node)
            return False
        seq.match, seq.own = match, own
        return True

    def extend(self, seq: Seq, token: int) -> bool:
        one = self._alloc_or_evict(1)  # clean: appended to seq.own
        if one is None:
            return False
        seq.own += one
        seq.tokens.append(token)
        return True

    def finish(self, seq: Seq) -> None:
        match = seq.match
        if not self.cache.insert(match.node, seq.tokens[match.length :], seq.own):
            self.slots.free(seq.own)
        seq.own = []
        self.cache.unlock(match.node)
        seq.match = None

    def retract(self, seq: Seq) -> None:
        self.slots.free(seq.own)
        seq.own = []
        if seq.match is not None:
            self.cache.unlock(seq.match.node)
            seq.match = None

    def rematch(self, seq: Seq) -> int:
        fresh = self.cache.match_and_lock(seq.tokens)  # leak: a match that is no longer is dropped while locked
        if seq.match is not None and fresh.length <= seq.match.length:
            return 0
        gained = fresh.length
        if seq.match is not None:
            gained -= seq.match.length
            self.cache.unlock(seq.match.node)
        self.slots.free(seq.own[:gained])
        seq.own = seq.own[gained:]
        seq.match = fresh
        return gained

    def hit_length(self, tokens: Sequence[int]) -> int:
        match = self.cache.match_and_lock(tokens)  # leak: only the length is read
        return match.length

    def score(self, tokens: Sequence[int]) -> float:
        match = self.cache.match_and_lock(tokens)  # clean: unlocked in finally
        try:
            return self.runner.score(match.slots, tokens[match.length :])
        finally:
            self.cache.unlock(match.node)

    def stick(self, name: str, tokens: Sequence[int]) -> None:
        previous = self._sticky.pop(name, None)
        if previous is not None:
            self.cache.unlock(previous.node)
        self._sticky[name] = self.cache.match_and_lock(tokens)  # clean: near miss, the former is unlocked first

    def unstick_all(self) -> None:
        while self._sticky:
            _, match = self._sticky.popitem()
            self.cache.unlock(match.node)

    def prefill_chunk(self, seq: Seq, n: int) -> int:
        chunk = self._alloc_or_evict(n)  # leak: what lies beyond `done` is not freed
        if chunk is None:
            return 0
        done = self.runner.prefill(seq.tokens, chunk)
        seq.own.extend(chunk[:done])
        return done
