"""Radix prefix cache over a flat token-slot pool, plus the controller that the scheduler calls."""
from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from typing import Iterable, Iterator, List, Optional, Tuple

import torch


class TokenPool:
    """KV slot indices, one per cached token. Not thread safe, owned by the scheduler."""

    def __init__(self, size: int, device: str = "cuda") -> None:
        self.size = size
        self.device = device
        self.clear()

    def clear(self) -> None:
        self.free_slots = torch.arange(self.size, dtype=torch.int64, device=self.device)

    def alloc(self, n: int) -> Optional[torch.Tensor]:
        if n > self.free_slots.numel():
            return None
        out, self.free_slots = self.free_slots[:n], self.free_slots[n:]
        return out

    def free(self, idx: torch.Tensor) -> None:
        if idx.numel():
            self.free_slots = torch.cat([self.free_slots, idx])


class RowPool:
    def __init__(self, rows: int) -> None:
        self._rows = list(range(rows))

    def take(self) -> Optional[int]:
        return self._rows.pop() if self._rows else None  # clean: returned to the caller

    def give(self, row: int) -> None:
        self._rows.append(row)


class Node:
    __slots__ = ("children", "parent", "key", "value", "lock_ref", "stamp")

    def __init__(self, parent: Optional["Node"] = None) -> None:
        self.children = defaultdict(Node)
        self.parent = parent
        self.key: Tuple[int, ...] = ()
        self.value = torch.empty(0, dtype=torch.int64)
        self.lock_ref = 0
        self.stamp = time.monotonic()


class RadixTree:
    def __init__(self, pool: TokenPool) -> None:
        self.pool = pool
        self.root = Node()

    def match(self, tokens: Tuple[int, ...]) -> Tuple[torch.Tensor, Node]:
        node, vals = self.root, []
        while tokens and tokens[0] in node.children:
            child = node.children[tokens[0]]
            if tokens[:len(child.key)] != child.key:
                break
            vals.append(child.value)
            tokens = tokens[len(child.key):]
            node = child
        return (torch.cat(vals) if vals else self.root.value), node

    def insert(self, tokens: Tuple[int, ...], value: torch.Tensor) -> int:
        """The tree takes over value past the returned length; the caller keeps the rest."""
        have, node = self.match(tokens)
        n = have.numel()
        if n < len(tokens) and tokens[n] not in node.children:
            child = Node(node)
            child.key, child.value = tokens[n:], value[n:]
            node.children[tokens[n]] = child
            return n
        return len(tokens) if n < len(tokens) else n

    def pin(self, node: Node) -> Node:
        cur = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent
        return node

    def unpin(self, node: Node) -> None:
        while node is not None:
            node.lock_ref -= 1
            node = node.parent

    def evict(self, want: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.lock_ref == 0 and n.parent]
        got = 0
        for leaf in sorted(leaves, key=lambda n: n.stamp):
            if got >= want:
                break
            self.pool.free(leaf.value)
            got += leaf.value.numel()
            del leaf.parent.children[leaf.key[0]]
        return got

    def _walk(self, node: Node) -> Iterator[Node]:
        for c in list(node.children.values()):
            yield c
            yield from self._walk(c)


@contextlib.contextmanager
def pinned(tree: RadixTree, node: Node):
    tree.pin(node)  # clean: unpinned in finally
    try:
        yield node
    finally:
        tree.unpin(node)


class CacheController:
    def __init__(self, pool: TokenPool, rows: RowPool, max_ctx: int) -> None:
        self.pool, self.rows, self.max_ctx = pool, rows, max_ctx
        self.tree = RadixTree(pool)
        self.req_to_token = torch.zeros(len(rows._rows), max_ctx, dtype=torch.int64)
        self._evict_lock = threading.Lock()

    def begin(self, req) -> bool:
        prefix, node = self.tree.match(tuple(req.tokens))
        req.node = self.tree.pin(node)  # leak: stays pinned when no row or no slots are free
        row = self.rows.take()  # clean: given back when no slots are free, else kept in req.row
        if row is None:
            return False
        slots = self._slots(len(req.tokens) - prefix.numel())  # clean: owned by req.slots, freed by finish() or abort()
        if slots is None:
            self.rows.give(row)
            return False
        req.row, req.slots, req.prefix = row, slots, prefix
        self.req_to_token[row, :len(req.tokens)] = torch.cat([prefix, slots])
        return True

    def _slots(self, n: int) -> Optional[torch.Tensor]:
        out = self.pool.alloc(n)  # clean: near miss, overwritten only when it is None
        if out is None:
            self.tree.evict(n)
            out = self.pool.alloc(n)  # clean: returned to the caller
        return out

    def extend(self, req, n: int) -> bool:
        more = self._slots(n)  # leak: dropped when the context limit is hit
        if more is None:
            return False
        end = req.prefix.numel() + req.slots.numel()
        if end + n > self.max_ctx:
            req.finish_reason = "length"
            return False
        self.req_to_token[req.row, end:end + n] = more
        req.slots = torch.cat([req.slots, more])
        return True

    def checkpoint(self, req) -> None:
        """After a prefill chunk: re-anchor the request on the longest stored prefix."""
        _, node = self.tree.match(tuple(req.tokens[:req.computed]))
        if node is req.node:
            return
        req.node = self.tree.pin(node)  # leak: the next checkpoint overwrites req.node without unpinning it

    def finish(self, req) -> None:
        value = torch.cat([req.prefix, req.slots])
        kept_from = self.tree.insert(tuple(req.tokens), value)
        self.pool.free(value[req.prefix.numel():kept_from])
        self.tree.unpin(req.node)
        self.rows.give(req.row)
        req.node = req.row = req.slots = None

    def abort(self, req) -> None:
        self.pool.free(req.slots)
        self.tree.unpin(req.node)
        self.rows.give(req.row)
        req.node = req.row = req.slots = None

    def warm(self, prompts: Iterable[Tuple[int, ...]], forward) -> int:
        done = 0
        for p in prompts:
            prefix, node = self.tree.match(p)
            with pinned(self.tree, node):  # clean: context manager
                tail = self.pool.alloc(len(p) - prefix.numel())  # leak: not freed when forward() returns False
                if tail is None:
                    break
                if not forward(p, prefix, tail):
                    continue
                kept_from = self.tree.insert(p, torch.cat([prefix, tail]))
                self.pool.free(tail[:kept_from - prefix.numel()])
                done += 1
        return done

    def score(self, tokens: Tuple[int, ...], conts: List[Tuple[int, ...]], forward) -> List[float]:
        prefix, node = self.tree.match(tokens)
        self.tree.pin(node)  # clean: unpinned in finally
        out = []
        try:
            for cont in conts:
                tmp = self.pool.alloc(len(cont))  # clean: near miss, freed before the NaN check continues
                if tmp is None:
                    out.append(float("-inf"))
                    continue
                logp = forward(cont, prefix, tmp)
                self.pool.free(tmp)
                if logp != logp:
                    continue
                out.append(logp)
            return out
        finally:
            self.tree.unpin(node)

    def trim(self, target_free: int) -> int:
        if not self._evict_lock.acquire(blocking=False):  # leak: stays held when there is nothing to trim
            return 0
        want = target_free - self.pool.free_slots.numel()
        if want <= 0:
            return 0
        got = self.tree.evict(want)
        self._evict_lock.release()
        return got
