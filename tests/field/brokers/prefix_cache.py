"""Radix prefix cache over a token slot pool, with lock references for running requests."""
from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Iterable, Optional


class TokenPool:
    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def free(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)

    def available(self) -> int:
        return len(self._free)


class Node:
    __slots__ = ("children", "parent", "key", "slots", "lock", "stamp")

    def __init__(self, parent: Optional["Node"], key: tuple[int, ...], slots: list[int]) -> None:
        self.children: dict[int, Node] = {}
        self.parent = parent
        self.key = key
        self.slots = slots
        self.lock = 0
        self.stamp = time.monotonic()

    def __lt__(self, other: "Node") -> bool:
        return self.stamp < other.stamp


def common_length(key: tuple[int, ...], tokens: list[int]) -> int:
    n = 0
    for a, b in zip(key, tokens):
        if a != b:
            break
        n += 1
    return n


class RadixTree:
    def __init__(self, pool: TokenPool) -> None:
        self.pool = pool
        self.root = Node(None, (), [])

    def match(self, tokens: list[int]) -> tuple[list[int], Node]:
        node, slots, pos = self.root, [], 0
        while pos < len(tokens):
            child = node.children.get(tokens[pos])
            if child is None:
                break
            n = common_length(child.key, tokens[pos:])
            if n < len(child.key):
                child = self._split(child, n)
            node = child
            node.stamp = time.monotonic()
            slots = slots + node.slots
            pos += n
        return slots, node

    def insert(self, node: Node, tokens: list[int], slots: list[int]) -> Node:
        while tokens:
            child = node.children.get(tokens[0])
            if child is None:
                child = Node(node, tuple(tokens), slots)
                node.children[tokens[0]] = child
                return child
            n = common_length(child.key, tokens)
            if n < len(child.key):
                child = self._split(child, n)
            self.pool.free(slots[:n])
            node, tokens, slots = child, tokens[n:], slots[n:]
        return node

    def _split(self, node: Node, at: int) -> Node:
        assert node.parent is not None
        upper = Node(node.parent, node.key[:at], node.slots[:at])
        upper.lock = node.lock
        upper.children = {node.key[at]: node}
        node.parent.children[node.key[0]] = upper
        node.parent, node.key, node.slots = upper, node.key[at:], node.slots[at:]
        return upper

    def inc_lock(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock += 1
            cur = cur.parent

    def dec_lock(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock -= 1
            cur = cur.parent

    def evict(self, want: int) -> int:
        heap = [n for n in self._leaves() if n.lock == 0]
        heapq.heapify(heap)
        done = 0
        while heap and done < want:
            node = heapq.heappop(heap)
            self.pool.free(node.slots)
            done += len(node.slots)
            assert node.parent is not None
            del node.parent.children[node.key[0]]
        return done

    def _leaves(self) -> list[Node]:
        out, stack = [], list(self.root.children.values())
        while stack:
            cur = stack.pop()
            stack.extend(cur.children.values())
            if not cur.children:
                out.append(cur)
        return out


@dataclass
class Req:
    rid: int
    tokens: list[int]
    prefix: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    node: Optional[Node] = None
    scratch: Optional[list[int]] = None


class PrefixCache:
    def __init__(self, pool: TokenPool) -> None:
        self.pool = pool
        self.tree = RadixTree(pool)

    def _alloc_or_evict(self, n: int) -> Optional[list[int]]:
        slots = self.pool.alloc(n)  # clean: near miss, a miss is None and the hit goes to the caller
        if slots is None:
            self.tree.evict(n - self.pool.available())
            slots = self.pool.alloc(n)  # clean: near miss, overwrites None only and is handed to the caller
        return slots

    def begin(self, req: Req) -> bool:
        req.prefix, node = self.tree.match(req.tokens)
        self.tree.inc_lock(node)  # leak: no room for the suffix returns False with the path still locked
        need = len(req.tokens) - len(req.prefix)
        own = self._alloc_or_evict(need)  # clean: kept in req.own until finish or abort
        if own is None:
            return False
        req.own = own
        req.node = node
        return True

    def begin_chunk(self, req: Req, limit: int) -> int:
        req.prefix, node = self.tree.match(req.tokens)
        self.tree.inc_lock(node)  # clean: near miss, unlocked on the dry pool, else kept in req.node
        take = min(limit, len(req.tokens) - len(req.prefix))
        own = self._alloc_or_evict(take)  # clean: near miss, kept in req.own until finish or abort
        if own is None:
            self.tree.dec_lock(node)
            return 0
        req.own = own
        req.node = node
        return take

    def extend(self, req: Req, new: list[int]) -> bool:
        more = self._alloc_or_evict(len(new))  # clean: appended to req.own
        if more is None:
            return False
        req.own += more
        req.tokens += new
        return True

    def promote(self, req: Req) -> None:
        """Publish what the request has computed so far and move its lock to the new node."""
        if req.node is None or not req.own:
            return
        done = len(req.prefix) + len(req.own)
        node = self.tree.insert(req.node, req.tokens[len(req.prefix) : done], req.own)
        self.tree.inc_lock(node)  # leak: the lock held through the old req.node is never dropped when the field is overwritten
        req.node = node
        req.own = []
        req.prefix, _ = self.tree.match(req.tokens[:done])

    def rebase(self, req: Req) -> None:
        if req.node is None:
            return
        slots, node = self.tree.match(req.tokens)
        if node is req.node:
            return
        self.tree.inc_lock(node)  # clean: near miss, the old node is unlocked before the field moves on
        self.tree.dec_lock(req.node)
        req.node = node
        req.prefix = slots

    def verify(self, req: Req, draft: list[int]) -> int:
        tmp = self._alloc_or_evict(len(draft))  # leak: only the rejected tail goes back, the accepted slots are dropped
        if tmp is None:
            return 0
        accepted = 0
        for a, b in zip(draft, req.tokens[-len(draft) :]):
            if a != b:
                break
            accepted += 1
        self.pool.free(tmp[accepted:])
        return accepted

    def probe(self, req: Req) -> bool:
        if req.scratch is None:
            req.scratch = self._alloc_or_evict(4)  # leak: abort leaves req.scratch behind
        return req.scratch is not None

    def finish(self, req: Req) -> None:
        if req.scratch is not None:
            self.pool.free(req.scratch)
            req.scratch = None
        self.pool.free(req.own)
        req.own = []
        if req.node is not None:
            self.tree.dec_lock(req.node)
            req.node = None

    def abort(self, req: Req) -> None:
        self.pool.free(req.own)
        req.own = []
        if req.node is not None:
            self.tree.dec_lock(req.node)
        req.node = None


def hit_rate(cache: PrefixCache, prompts: list[list[int]]) -> float:
    hits = total = 0
    for tokens in prompts:
        slots, node = cache.tree.match(tokens)
        cache.tree.inc_lock(node)  # clean: near miss, both the continue and the fall-through unlock
        total += len(tokens)
        if not slots:
            cache.tree.dec_lock(node)
            continue
        hits += len(slots)
        cache.tree.dec_lock(node)
    return hits / max(total, 1)


def serve(cache: PrefixCache, reqs: list[Req]) -> int:
    served = 0
    for req in reqs:
        if not cache.begin(req):
            continue
        if not cache.probe(req) or not cache.extend(req, [0]):
            cache.abort(req)
            continue
        cache.promote(req)
        cache.rebase(req)
        served += 1
        cache.finish(req)
    return served
