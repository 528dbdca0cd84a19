"""Radix tree over token pages, shared by all requests of one model.

Nodes own token slots of the TokenPool.  A request that matched a prefix locks
the path; locked nodes cannot be evicted.
"""
from __future__ import annotations

import heapq
import threading
import time
from typing import Iterable, Optional

import torch


class TokenPool:
    """Slots of the flat KV buffer; leases are index tensors."""

    def __init__(self, size: int):
        self.size = size
        self.free_slots = torch.arange(size)

    def available_size(self) -> int:
        return self.free_slots.numel()

    def alloc(self, need: int) -> Optional[torch.Tensor]:
        if need > self.free_slots.numel():
            return None
        out, self.free_slots = self.free_slots[:need], self.free_slots[need:]
        return out

    def free(self, idx: torch.Tensor) -> None:
        self.free_slots = torch.cat([self.free_slots, idx])


class ReqRows:
    """Row of req_to_token per running request."""

    def __init__(self, n: int, max_ctx: int):
        self.req_to_token = torch.zeros(n, max_ctx, dtype=torch.int32)
        self.rows = list(range(n))

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self.rows):
            return None
        taken, self.rows = self.rows[:n], self.rows[n:]
        return taken

    def free(self, row: int) -> None:
        self.rows.append(row)


class Node:
    _ids = 0

    def __init__(self, key: tuple[int, ...], value: torch.Tensor, parent: Optional["Node"]):
        self.key = key
        self.value = value
        self.parent = parent
        self.children: dict[int, "Node"] = {}
        self.locks = 0
        self.stamp = time.monotonic()
        Node._ids += 1
        self.nid = Node._ids

    def __lt__(self, other: "Node") -> bool:
        return self.stamp < other.stamp


class RadixTree:
    def __init__(self, pool: TokenPool):
        self.pool = pool
        self.root = Node((), torch.empty(0, dtype=torch.long), None)
        self.mu = threading.Lock()

    def match(self, tokens: tuple[int, ...]) -> tuple[Node, int]:
        node, n = self.root, 0
        while n < len(tokens):
            child = node.children.get(tokens[n])
            if child is None or tokens[n : n + len(child.key)] != child.key:
                break
            node, n = child, n + len(child.key)
        node.stamp = time.monotonic()
        return node, n

    def lock_path(self, node: Node) -> Node:
        cur: Optional[Node] = node
        while cur is not None:
            cur.locks += 1
            cur = cur.parent
        return node

    def unlock_path(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.locks -= 1
            cur = cur.parent

    def match_and_lock(self, tokens: tuple[int, ...]) -> tuple[Node, int]:
        self.mu.acquire()  # clean: released in finally
        try:
            node, n = self.match(tokens)
            return self.lock_path(node), n  # clean: the locked node is returned
        finally:
            self.mu.release()

    def insert(self, tokens: tuple[int, ...], slots: torch.Tensor, shared: int = 0) -> int:
        """Takes over slots[shared:]; those of already cached tokens are freed."""
        node, n = self.match(tokens)
        self.pool.free(slots[shared:n])
        if n < len(tokens):
            if tokens[n] in node.children:
                self.pool.free(slots[n:])
            else:
                node.children[tokens[n]] = Node(tokens[n:], slots[n:], node)
        return n

    def leaves(self) -> Iterable[Node]:
        todo = [self.root]
        while todo:
            node = todo.pop()
            if not node.children and node is not self.root:
                yield node
            todo.extend(node.children.values())

    def evict(self, want: int) -> int:
        heap = [leaf for leaf in self.leaves() if leaf.locks == 0]
        heapq.heapify(heap)
        got = 0
        while heap and got < want:
            node = heapq.heappop(heap)
            self.pool.free(node.value)
            got += node.value.numel()
            del node.parent.children[node.key[0]]
        return got

    def detach_branch(self, tokens: tuple[int, ...]) -> bool:
        """Forget one conversation, for instance after a privacy request."""
        node, n = self.match(tokens)
        if n == 0 or node.locks:
            return False
        victim = node.parent.children.pop(node.key[0])  # leak: children below the popped node keep their slots
        self.pool.free(victim.value)
        return True


class Req:
    def __init__(self, rid: str, tokens: list[int]):
        self.rid = rid
        self.tokens = tokens
        self.row: Optional[int] = None
        self.node: Optional[Node] = None
        self.prefix = 0
        self.own: Optional[torch.Tensor] = None


class Planner:
    def __init__(self, pool: TokenPool, rows: ReqRows, tree: RadixTree):
        self.pool = pool
        self.rows = rows
        self.tree = tree
        self.running: list[Req] = []

    def _alloc(self, need: int) -> Optional[torch.Tensor]:
        out = self.pool.alloc(need)  # clean: near miss, allocated again only when the first try gave None
        if out is None:
            self.tree.evict(need - self.pool.available_size())
            out = self.pool.alloc(need)  # clean: returned to the caller
        return out

    def schedule(self, req: Req) -> bool:
        node, n = self.tree.match_and_lock(tuple(req.tokens))  # clean: unlocked on failure, kept in req.node otherwise
        own = self._alloc(len(req.tokens) - n)  # clean: freed when no row is left, kept in req.own otherwise
        if own is None:
            self.tree.unlock_path(node)
            return False
        got = self.rows.alloc(1)  # clean: the row moves to req.row
        if got is None:
            self.pool.free(own)
            self.tree.unlock_path(node)
            return False
        req.row = got[0]
        req.node, req.prefix, req.own = node, n, own
        self.running.append(req)
        return True

    def finish(self, req: Req) -> None:
        self.running.remove(req)
        self.tree.insert(tuple(req.tokens), torch.cat([self._prefix_slots(req), req.own]), req.prefix)
        self.rows.free(req.row)
        self.tree.unlock_path(req.node)
        req.row = req.node = req.own = None

    def _prefix_slots(self, req: Req) -> torch.Tensor:
        return self.rows.req_to_token[req.row, : req.prefix].long()

    def schedule_batch(self, reqs: list[Req]) -> int:
        got = self.rows.alloc(len(reqs))  # leak: rows of requests without memory are never stored or freed
        if got is None:
            return 0
        admitted = 0
        for req, row in zip(reqs, got):
            own = self._alloc(len(req.tokens))  # clean: moved to the request
            if own is None:
                continue
            req.row, req.own, req.node = row, own, self.tree.root
            self.tree.lock_path(self.tree.root)  # clean: near miss, req.node is the root, finish unlocks it
            self.running.append(req)
            admitted += 1
        return admitted

    def score_only(self, req: Req, model) -> Optional[float]:
        node, n = self.tree.match_and_lock(tuple(req.tokens))  # leak: fully cached prompts return with the path locked
        if n == len(req.tokens):
            return model.cached_score(node)
        tmp = self._alloc(len(req.tokens) - n)  # clean: freed after scoring
        if tmp is None:
            self.tree.unlock_path(node)
            return None
        score = model.score(req.tokens, n, tmp)
        self.pool.free(tmp)
        self.tree.unlock_path(node)
        return score

    def retract(self, req: Req) -> None:
        self.running.remove(req)
        self.pool.free(req.own)
        self.rows.free(req.row)
        self.tree.unlock_path(req.node)
        req.own = req.row = req.node = None

    def rematch(self, req: Req) -> int:
        """The tree grew since the request was queued; lock the longer path."""
        node, n = self.tree.match_and_lock(tuple(req.tokens))  # leak: stays locked when the match is not longer
        if n <= req.prefix:
            return req.prefix
        if req.node is not None:
            self.tree.unlock_path(req.node)
        req.node, req.prefix = node, n
        return n

    def rematch_page(self, req: Req, page: int) -> int:
        node, n = self.tree.match_and_lock(tuple(req.tokens[:-1]))  # clean: near miss, old and new path are unlocked or stored
        if n - req.prefix < page:
            self.tree.unlock_path(node)
            return req.prefix
        old, req.node = req.node, node
        if old is not None:
            self.tree.unlock_path(old)
        req.prefix = n
        return n

    def rebuild(self, prompts: list[list[int]], model) -> int:
        built = 0
        for toks in prompts:
            slots = self._alloc(len(toks))  # leak: a rejected prompt continues without freeing its slots
            if slots is None:
                break
            if not model.prefill(toks, slots):
                continue
            self.tree.insert(tuple(toks), slots)
            built += 1
        return built
