"""Radix prefix cache and the two schedulers that sit on it."""
from __future__ import annotations

import time
from typing import Dict, List, Optional, Sequence, Tuple


class TokenSlots:
    """KV rows addressed per token; bitmap allocator."""

    def __init__(self, size: int) -> None:
        self._used = bytearray(size)
        self._avail = size

    def available(self) -> int:
        return self._avail

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > self._avail:
            return None
        out: List[int] = []
        for i, used in enumerate(self._used):
            if len(out) == n:
                break
            if not used:
                self._used[i] = 1
                out.append(i)
        self._avail -= n
        return out

    def free(self, rows: Sequence[int]) -> None:
        for r in rows:
            self._used[r] = 0
        self._avail += len(rows)


class Node:
    __slots__ = ("children", "parent", "key", "rows", "lock_ref", "last_used")

    def __init__(self, parent: Optional["Node"], key: Tuple[int, ...], rows: List[int]) -> None:
        self.children: Dict[Tuple[int, ...], Node] = {}
        self.parent = parent
        self.key = key
        self.rows = rows
        self.lock_ref = 0
        self.last_used = time.monotonic()

    def depth(self) -> int:
        node, n = self, 0
        while node is not None:
            n += len(node.key)
            node = node.parent
        return n


class RadixCache:
    def __init__(self, slots: TokenSlots) -> None:
        self.slots = slots
        self.root = Node(None, (), [])

    def match(self, tokens: Sequence[int]) -> Node:
        node, i = self.root, 0
        while i < len(tokens):
            child = next((c for k, c in node.children.items() if tuple(tokens[i:i + len(k)]) == k), None)
            if child is None:
                break
            node, i = child, i + len(child.key)
            node.last_used = time.monotonic()
        return node

    def insert(self, tokens: Sequence[int], rows: List[int]) -> Node:
        """Rows of the new tail become the tree's; rows that duplicate what it has are freed."""
        node = self.match(tokens)
        tail = tuple(tokens[node.depth():])
        split = len(rows) - len(tail)
        self.slots.free(rows[:split])
        if tail:
            child = Node(node, tail, rows[split:])
            node.children[tail] = child
            node = child
        return node

    def inc_lock_ref(self, node: Node) -> None:
        while node is not None:
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: Node) -> None:
        while node is not None:
            node.lock_ref -= 1
            node = node.parent

    def evict(self, want: int) -> int:
        got = 0
        stack = [self.root]
        leaves = []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node.lock_ref == 0 and node.parent is not None:
                leaves.append(node)
        for leaf in sorted(leaves, key=lambda x: x.last_used):
            if got >= want:
                break
            self.slots.free(leaf.rows)
            got += len(leaf.rows)
            del leaf.parent.children[leaf.key]
        return got


class Req:
    def __init__(self, rid: str, tokens: List[int]) -> None:
        self.rid = rid
        self.tokens = tokens
        self.last_node: Optional[Node] = None
        self.rows: Optional[List[int]] = None
        self.computed = 0


class FcfsScheduler:
    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.running: Dict[str, Req] = {}

    def admit(self, req: Req) -> bool:
        node = self.cache.match(req.tokens)
        self.cache.inc_lock_ref(node)  # clean: dropped on shortage, else kept on the request
        need = len(req.tokens) - node.depth()
        if need > self.cache.slots.available():
            self.cache.evict(need - self.cache.slots.available())
        rows = self.cache.slots.alloc(need)  # clean: moved to the request, freed or inserted in finish
        if rows is None:
            self.cache.dec_lock_ref(node)
            return False
        req.last_node, req.rows = node, rows
        self.running[req.rid] = req
        return True

    def finish(self, rid: str, keep: bool) -> None:
        req = self.running.pop(rid)
        if keep:
            self.cache.insert(req.tokens, req.rows)
        else:
            self.cache.slots.free(req.rows)
        self.cache.dec_lock_ref(req.last_node)
        req.last_node = req.rows = None

    def promote(self, req: Req, new_len: int) -> None:
        """After a partial prefill, hold the longer prefix instead of the shorter."""
        old = req.last_node
        node = self.cache.match(req.tokens[:new_len])
        self.cache.inc_lock_ref(node)  # clean: near miss, the held node is exchanged and the old one dropped
        req.last_node = node
        if old is not None:
            self.cache.dec_lock_ref(old)

    def hit_rate(self, prompts: List[List[int]]) -> float:
        hit = total = 0
        for tokens in prompts:
            total += len(tokens)
            node = self.cache.match(tokens)
            if node is self.cache.root:
                continue
            self.cache.inc_lock_ref(node)  # clean: near miss, the continue is before the increment
            hit += node.depth()
            self.cache.dec_lock_ref(node)
        return hit / max(total, 1)


class ChunkScheduler:
    def __init__(self, cache: RadixCache, chunk: int) -> None:
        self.cache = cache
        self.chunk = chunk
        self.live: Dict[str, Req] = {}

    def start(self, req: Req) -> bool:
        node = self.cache.match(req.tokens)
        self.cache.inc_lock_ref(node)  # leak: no rows for the first chunk, returns with the prefix still locked
        first = min(self.chunk, len(req.tokens) - node.depth())
        rows = self.cache.slots.alloc(first)  # clean: kept on the request, freed in stop
        if rows is None:
            return False
        req.last_node, req.rows, req.computed = node, rows, node.depth() + first
        self.live[req.rid] = req
        return True

    def next_chunk(self, req: Req) -> bool:
        n = min(self.chunk, len(req.tokens) - req.computed)
        more = self.cache.slots.alloc(n)  # clean: near miss, extended into req.rows
        if more is None:
            return False
        req.rows += more
        req.computed += n
        return True

    def stop(self, req: Req) -> None:
        self.live.pop(req.rid, None)
        self.cache.slots.free(req.rows)
        self.cache.dec_lock_ref(req.last_node)
        req.rows, req.last_node = None, None

    def warm(self, system_prompts: List[List[int]]) -> List[Node]:
        pinned: List[Node] = []
        for tokens in system_prompts:
            node = self.cache.match(tokens)
            self.cache.inc_lock_ref(node)  # leak: short matches `continue` past the list that unwarm walks
            if node.depth() < self.chunk:
                continue
            pinned.append(node)
        return pinned

    def unwarm(self, pinned: List[Node]) -> None:
        while pinned:
            self.cache.dec_lock_ref(pinned.pop())

    def replay(self, req: Req) -> bool:
        """Preempted request recomputes everything: fresh rows for its whole length."""
        rows = self.cache.slots.alloc(len(req.tokens))  # leak: request already stopped, returns with the fresh rows
        if rows is None:
            return False
        if req.rid not in self.live:
            return False
        self.cache.slots.free(req.rows)
        req.rows = rows
        return True
