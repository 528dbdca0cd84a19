from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Optional

import torch


class TokenToKVPool:
    def __init__(self, size: int) -> None:
        self.free_slots = torch.arange(size, dtype=torch.int64)

    def available(self) -> int:
        return int(self.free_slots.numel())

    def alloc(self, n: int) -> Optional[torch.Tensor]:
        if n > self.free_slots.numel():
            return None
        taken, self.free_slots = self.free_slots[:n], self.free_slots[n:]
        return taken

    def free(self, indices: torch.Tensor) -> None:
        self.free_slots = torch.cat([self.free_slots, indices])


class ReqSlotPool:
    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def acquire(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        self._free.append(slot)


@dataclass(eq=False)
class TreeNode:
    key: tuple[int, ...] = ()
    value: Optional[torch.Tensor] = None
    parent: Optional[TreeNode] = None
    children: dict[int, TreeNode] = field(default_factory=dict)
    lock_ref: int = 0
    last_access: float = field(default_factory=time.monotonic)

    def __lt__(self, other: TreeNode) -> bool:
        return self.last_access < other.last_access


class RadixCache:
    def __init__(self, pool: TokenToKVPool) -> None:
        self.root = TreeNode()
        self.pool = pool

    def match_prefix(self, tokens: list[int]) -> tuple[int, TreeNode]:
        node, done = self.root, 0
        while done < len(tokens):
            child = node.children.get(tokens[done])
            if child is None or tuple(tokens[done:done + len(child.key)]) != child.key:
                break
            child.last_access = time.monotonic()
            done += len(child.key)
            node = child
        return done, node

    def inc_lock_ref(self, node: TreeNode) -> None:
        cur: Optional[TreeNode] = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        cur: Optional[TreeNode] = node
        while cur is not None:
            cur.lock_ref -= 1
            cur = cur.parent

    def insert(self, node: TreeNode, tokens: list[int], value: torch.Tensor) -> TreeNode:
        if not tokens:
            self.pool.free(value)
            return node
        existing = node.children.get(tokens[0])
        if existing is not None:
            self.pool.free(value)
            return node
        child = TreeNode(tuple(tokens), value, node)
        node.children[tokens[0]] = child
        return child

    def evict(self, want: int) -> int:
        leaves = [n for n in self._nodes() if not n.children and n.lock_ref == 0 and n.value is not None]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < want:
            node = heapq.heappop(leaves)
            self.pool.free(node.value)
            freed += len(node.key)
            del node.parent.children[node.key[0]]
        return freed

    def _nodes(self) -> list[TreeNode]:
        out, stack = [], [self.root]
        while stack:
            node = stack.pop()
            out.append(node)
            stack.extend(node.children.values())
        return out


@dataclass
class Req:
    rid: str
    tokens: list[int]
    prefix_len: int = 0
    last_node: Optional[TreeNode] = None
    slot: Optional[int] = None
    kv: Optional[torch.Tensor] = None


class PrefillAdder:
    def __init__(self, cache: RadixCache, slots: ReqSlotPool) -> None:
        self.cache = cache
        self.slots = slots
        self.batch: list[Req] = []

    def _alloc_or_evict(self, n: int) -> Optional[torch.Tensor]:
        out = self.cache.pool.alloc(n)  # clean: near miss, retried only where the first try gave nothing
        if out is None:
            self.cache.evict(n - self.cache.pool.available())
            out = self.cache.pool.alloc(n)  # clean: returned
        return out

    def add_one(self, req: Req) -> bool:
        req.prefix_len, req.last_node = self.cache.match_prefix(req.tokens)
        self.cache.inc_lock_ref(req.last_node)  # leak: a request refused for want of a slot keeps its prefix locked
        req.slot = self.slots.acquire()  # clean: near miss, released below or by finish and retract
        if req.slot is None:
            return False
        req.kv = self._alloc_or_evict(len(req.tokens) - req.prefix_len)  # clean: goes with the request to finish or retract
        if req.kv is None:
            self.slots.release(req.slot)
            self.cache.dec_lock_ref(req.last_node)
            return False
        self.batch.append(req)
        return True

    def budget(self, reqs: list[Req]) -> int:
        total = 0
        for req in reqs:
            done, node = self.cache.match_prefix(req.tokens)
            self.cache.inc_lock_ref(node)  # clean: near miss, break comes after the unlock
            room = self.cache.pool.available() - total
            self.cache.dec_lock_ref(node)
            if len(req.tokens) - done > room:
                break
            total += len(req.tokens) - done
        return total

    def rechunk(self, req: Req, n: int) -> bool:
        more = self._alloc_or_evict(n)  # leak: replaces the indices that the request already holds
        if more is None:
            return False
        req.kv = more
        return True

    def finish(self, req: Req) -> None:
        self.batch.remove(req)
        self.cache.insert(req.last_node, req.tokens[req.prefix_len:], req.kv)
        self.cache.dec_lock_ref(req.last_node)
        self.slots.release(req.slot)
        req.kv = None

    def retract(self, req: Req) -> None:
        self.batch.remove(req)
        self.cache.pool.free(req.kv)
        self.cache.dec_lock_ref(req.last_node)
        self.slots.release(req.slot)
        req.kv = req.slot = None

    def relock(self, req: Req) -> None:
        done, node = self.cache.match_prefix(req.tokens)
        if node is not req.last_node:
            self.cache.inc_lock_ref(node)  # leak: last_node is overwritten while its own path is still locked
            req.prefix_len, req.last_node = done, node

    def move_lock(self, req: Req) -> None:
        done, node = self.cache.match_prefix(req.tokens)
        self.cache.inc_lock_ref(node)  # clean: near miss, the old node is unlocked after the new one is safe
        self.cache.dec_lock_ref(req.last_node)
        req.prefix_len, req.last_node = done, node


class HealthCheck:
    def __init__(self, slots: ReqSlotPool, pool: TokenToKVPool) -> None:
        self.slots = slots
        self.pool = pool

    def probe(self, n: int) -> str:
        slot = self.slots.acquire()  # leak: busy KV returns without the slot
        if slot is None:
            return "no-slot"
        kv = self.pool.alloc(n)  # clean: freed just below
        if kv is None:
            return "no-kv"
        self.pool.free(kv)
        self.slots.release(slot)
        return "ok"
