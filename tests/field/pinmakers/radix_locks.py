"""A radix tree over token prefixes whose nodes own KV rows and are locked while in use."""

from __future__ import annotations

import time
from typing import Callable, Dict, List, Optional, Tuple

import torch


class RowPool:
    """Rows of the flat KV buffer; a free-row tensor is sliced from its head."""

    def __init__(self, rows: int, width: int):
        self.kv = torch.zeros(rows, width)
        self._free = torch.arange(rows)

    def available(self) -> int:
        return int(self._free.numel())

    def alloc(self, n: int) -> Optional[torch.Tensor]:
        if n > self._free.numel():
            return None
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def free(self, rows: torch.Tensor) -> None:
        self._free = torch.cat([self._free, rows])


class Node:
    def __init__(self, parent: Optional["Node"], key: Tuple[int, ...], rows: torch.Tensor):
        self.parent = parent
        self.key = key
        self.rows = rows
        self.children: Dict[int, "Node"] = {}
        self.locks = 0
        self.last_used = time.monotonic()


class Req:
    def __init__(self, rid: str, tokens: List[int]):
        self.rid = rid
        self.tokens = tokens
        self.node: Optional[Node] = None
        self.rows: Optional[torch.Tensor] = None
        self.own = 0
        self.aborted = False


class RadixCache:
    def __init__(self, pool: RowPool):
        self.pool = pool
        self.root = Node(None, (), torch.empty(0, dtype=torch.long))

    def lock(self, node: Node) -> Node:
        cur: Optional[Node] = node
        while cur is not None:
            cur.locks += 1
            cur = cur.parent
        return node

    def unlock(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.locks -= 1
            cur = cur.parent

    def _descend(self, tokens: List[int]) -> Tuple[Node, int]:
        node, i = self.root, 0
        while i < len(tokens):
            child = node.children.get(tokens[i])
            if child is None or tuple(tokens[i:i + len(child.key)]) != child.key:
                break
            node, i = child, i + len(child.key)
        node.last_used = time.monotonic()
        return node, i

    def match_and_lock(self, tokens: List[int]) -> Tuple[Node, int]:
        node, n = self._descend(tokens)
        return self.lock(node), n  # clean: returned to the caller

    def insert(self, tokens: List[int], rows: torch.Tensor, own: int) -> Node:
        """Takes over rows[own:]: those the tree has already are freed, the rest go to a node."""
        node, i = self._descend(tokens)
        self.pool.free(rows[own:i])
        if i == len(tokens):
            return node
        if tokens[i] in node.children:
            self.pool.free(rows[i:])
            return node
        leaf = Node(node, tuple(tokens[i:]), rows[i:])
        node.children[tokens[i]] = leaf
        return leaf

    def evict(self, want: int) -> int:
        freed = 0
        leaves = [n for n in self._walk(self.root) if not n.children and n.locks == 0 and n.parent]
        for leaf in sorted(leaves, key=lambda n: n.last_used):
            if freed >= want:
                break
            self.pool.free(leaf.rows)
            freed += int(leaf.rows.numel())
            del leaf.parent.children[leaf.key[0]]
        return freed

    def _walk(self, node: Node):
        yield node
        for child in list(node.children.values()):
            yield from self._walk(child)

    def alloc_evicting(self, n: int) -> Optional[torch.Tensor]:
        rows = self.pool.alloc(n)  # clean: near miss, only a None is rebound
        if rows is None:
            self.evict(n - self.pool.available())
            rows = self.pool.alloc(n)  # clean: returned to the caller
        return rows

    def alloc_spread(self, n: int) -> Optional[torch.Tensor]:
        """Rows in two halves, so that a long request does not need one free run."""
        lo = self.pool.alloc(n // 2)  # leak: not freed when the upper half is missing
        if lo is None:
            return None
        hi = self.alloc_evicting(n - n // 2)  # clean: joined into the returned rows
        if hi is None:
            return None
        return torch.cat([lo, hi])


class PrefixScheduler:
    def __init__(self, cache: RadixCache, compute: Callable[[List[int], torch.Tensor], None]):
        self.cache = cache
        self.compute = compute
        self.active: Dict[str, Req] = {}
        self.draft_rows: Dict[str, torch.Tensor] = {}

    def start(self, req: Req) -> bool:
        node, hit = self.cache.match_and_lock(req.tokens)  # clean: unlocked when there are no rows, else kept on req
        rows = self.cache.alloc_evicting(len(req.tokens) - hit)  # clean: kept on req, finish() and abort() hand it on
        if rows is None:
            self.cache.unlock(node)
            return False
        req.node, req.own = node, hit
        req.rows = torch.cat([self._rows_to(node), rows])
        self.compute(req.tokens[hit:], rows)
        self.active[req.rid] = req
        return True

    def start_if_short(self, req: Req, limit: int) -> bool:
        node, hit = self.cache.match_and_lock(req.tokens)  # leak: a request over the limit is refused with the path locked
        if len(req.tokens) - hit > limit:
            return False
        rows = self.cache.alloc_evicting(len(req.tokens) - hit)  # clean: kept on req
        if rows is None:
            self.cache.unlock(node)
            return False
        req.node, req.own = node, hit
        req.rows = torch.cat([self._rows_to(node), rows])
        self.active[req.rid] = req
        return True

    @staticmethod
    def _rows_to(node: Node) -> torch.Tensor:
        parts: List[torch.Tensor] = []
        cur: Optional[Node] = node
        while cur is not None:
            parts.append(cur.rows)
            cur = cur.parent
        return torch.cat(parts[::-1])

    def finish(self, req: Req) -> None:
        self.settle(req, [])
        self.cache.unlock(req.node)
        if req.aborted:
            self.cache.pool.free(req.rows[req.own:])
        else:
            self.cache.insert(req.tokens, req.rows, req.own)
        req.node = req.rows = None
        self.active.pop(req.rid, None)

    def abort(self, rid: str) -> None:
        req = self.active.get(rid)
        if req is not None:
            req.aborted = True
            self.finish(req)

    def relock(self, req: Req) -> None:
        """Move the lock to the longest prefix that is known now."""
        node, _ = self.cache.match_and_lock(req.tokens)  # clean: near miss, the lock of the old node is let go
        old, req.node = req.node, node
        self.cache.unlock(old)

    def hit_rate(self, prompts: List[List[int]]) -> float:
        hits = total = 0
        for tokens in prompts:
            _, n = self.cache.match_and_lock(tokens)  # leak: the node is thrown away with its lock
            hits += n
            total += len(tokens)
        return hits / max(total, 1)

    def draft(self, req: Req, k: int) -> bool:
        rows = self.cache.alloc_evicting(k)  # clean: kept in draft_rows, which settle() takes out
        if rows is None:
            return False
        stale = self.draft_rows.pop(req.rid, None)
        if stale is not None:
            self.cache.pool.free(stale)
        self.draft_rows[req.rid] = rows
        return True

    def settle(self, req: Req, accepted: List[int]) -> None:
        rows = self.draft_rows.pop(req.rid, None)
        if rows is None:
            return
        n = len(accepted)
        req.rows = torch.cat([req.rows, rows[:n]])
        req.tokens.extend(accepted)
        self.cache.pool.free(rows[n:])

    def verify(self, req: Req, tokens: List[int], greedy: List[int]) -> int:
        rows = self.cache.alloc_evicting(len(tokens))  # leak: rows of rejected tokens are not freed
        if rows is None:
            return 0
        self.compute(tokens, rows)
        n = 0
        while n < len(tokens) and tokens[n] == greedy[n]:
            n += 1
        req.rows = torch.cat([req.rows, rows[:n]])
        req.tokens.extend(tokens[:n])
        return n

    def rescore(self, req: Req, retries: int) -> bool:
        for _ in range(retries):
            rows = self.cache.pool.alloc(len(req.tokens))  # clean: freed in finally of each try
            if rows is None:
                self.cache.evict(len(req.tokens))
                continue
            try:
                self.compute(req.tokens, rows)
                return True
            except FloatingPointError:
                continue
            finally:
                self.cache.pool.free(rows)
        return False
