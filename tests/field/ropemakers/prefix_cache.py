"""Radix prefix cache over a token pool. Nodes are locked while a request reads them."""
from __future__ import annotations

import heapq
import threading
import time
from typing import Dict, List, Optional, Tuple

import torch


class TokenPool:
    """Hands out KV token indices as int64 tensors."""

    def __init__(self, size: int, device: str = "cpu"):
        self.size = size
        self.device = device
        self.free_idx = torch.arange(size, dtype=torch.int64, device=device)

    def available(self) -> int:
        return self.free_idx.numel()

    def alloc(self, n: int) -> Optional[torch.Tensor]:
        if n > self.free_idx.numel():
            return None
        head, self.free_idx = self.free_idx[:n], self.free_idx[n:]
        return head

    def free(self, idx: torch.Tensor) -> None:
        if idx.numel():
            self.free_idx = torch.cat((self.free_idx, idx))


class Node:
    __slots__ = ("key", "value", "children", "parent", "lock_ref", "last_access")

    def __init__(self, key: Tuple[int, ...] = (), parent: Optional["Node"] = None):
        self.key = key
        self.value: Optional[torch.Tensor] = None
        self.children: Dict[int, "Node"] = {}
        self.parent = parent
        self.lock_ref = 0
        self.last_access = time.monotonic()

    def __lt__(self, other: "Node") -> bool:
        return self.last_access < other.last_access


class Req:
    def __init__(self, rid: str, tokens: List[int]):
        self.rid = rid
        self.tokens = tokens
        self.node: Optional[Node] = None
        self.kv: Optional[torch.Tensor] = None
        self.aborted = False


class PrefixCache:
    def __init__(self, pool: TokenPool, disable: bool = False):
        self.pool = pool
        self.disable = disable
        self.root = Node()
        self.mutex = threading.Lock()
        self.draft_kv: Dict[str, torch.Tensor] = {}
        self.evicted = 0

    # -- reference counts ----------------------------------------------------

    def hold(self, node: Node) -> Node:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent
        return node

    def unhold(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock_ref -= 1
            cur = cur.parent

    def walk(self, tokens: List[int]) -> Tuple[Node, int]:
        node, pos = self.root, 0
        while pos < len(tokens):
            nxt = node.children.get(tokens[pos])
            if nxt is None or tuple(tokens[pos:pos + len(nxt.key)]) != nxt.key:
                break
            nxt.last_access = time.monotonic()
            pos += len(nxt.key)
            node = nxt
        return node, pos

    # -- requests ------------------------------------------------------------

    def begin(self, req: Req) -> bool:
        node, matched = self.walk(req.tokens)
        self.hold(node)  # leak: node stays locked when neither the pool nor eviction gives room
        need = len(req.tokens) - matched
        kv = self.pool.alloc(need)  # clean: stored on the request, finish() caches or frees it
        if kv is None:
            self.evict(need)
            kv = self.pool.alloc(need)  # clean: stored on the request
            if kv is None:
                return False
        req.node = node
        req.kv = kv
        return True

    def begin_locked(self, req: Req) -> bool:
        with self.mutex:
            node, matched = self.walk(req.tokens)
            req.node = self.hold(node)  # clean: near miss, undone through the request when alloc fails
            req.kv = self.pool.alloc(len(req.tokens) - matched)  # clean: kept on the request, finish() returns it
            if req.kv is None:
                self.unhold(req.node)
                req.node = None
                return False
        return True

    def finish(self, req: Req) -> None:
        if req.kv is not None:
            if self.disable or req.aborted or req.kv.numel() == 0:
                self.pool.free(req.kv)
            else:
                self.insert(req.node or self.root, req.tokens, req.kv)
            req.kv = None
        if req.node is not None:
            self.unhold(req.node)
            req.node = None

    def insert(self, parent: Node, tokens: List[int], kv: torch.Tensor) -> None:
        key = tuple(tokens[-kv.numel():])
        twin = parent.children.get(key[0])
        if twin is not None:
            # someone else cached that branch first
            self.pool.free(kv)
            return
        child = Node(key, parent)
        child.value = kv
        parent.children[key[0]] = child

    def extend(self, req: Req, n: int) -> bool:
        more = self.pool.alloc(n)  # leak: lost when the request was aborted in between
        if more is None:
            return False
        if req.aborted:
            return False
        req.kv = more if req.kv is None else torch.cat((req.kv, more))
        return True

    def retract(self, req: Req, keep: int) -> int:
        if req.kv is None or req.kv.numel() <= keep:
            return 0
        tail = req.kv[keep:]
        req.kv = req.kv[:keep]
        self.pool.free(tail)
        return tail.numel()

    # -- drafts --------------------------------------------------------------

    def start_draft(self, req: Req, width: int) -> Optional[torch.Tensor]:
        slots = self.pool.alloc(width)  # leak: a second draft of the same request replaces the first in the dict
        if slots is None:
            return None
        self.draft_kv[req.rid] = slots
        return slots

    def redraft(self, req: Req, width: int) -> Optional[torch.Tensor]:
        old = self.draft_kv.pop(req.rid, None)
        if old is not None:
            self.pool.free(old)
        slots = self.pool.alloc(width)  # clean: the earlier draft is freed first
        if slots is not None:
            self.draft_kv[req.rid] = slots
        return slots

    def settle_draft(self, req: Req, accepted: int) -> None:
        slots = self.draft_kv.pop(req.rid, None)
        if slots is None:
            return
        good, rest = slots[:accepted], slots[accepted:]
        req.kv = good if req.kv is None else torch.cat((req.kv, good))
        self.pool.free(rest)

    # -- reading -------------------------------------------------------------

    def peek(self, tokens: List[int]) -> Optional[torch.Tensor]:
        node, pos = self.walk(tokens)
        self.hold(node)  # leak: a partial match returns without unholding the node
        if pos < len(tokens):
            return None
        out = node.value.clone() if node.value is not None else None
        self.unhold(node)
        return out

    def gather(self, tokens: List[int]) -> torch.Tensor:
        node, _ = self.walk(tokens)
        self.hold(node)  # clean: unheld in finally
        try:
            parts = []
            cur: Optional[Node] = node
            while cur is not None and cur.value is not None:
                parts.append(cur.value)
                cur = cur.parent
            if not parts:
                return torch.empty(0, dtype=torch.int64)
            return torch.cat(parts[::-1])
        finally:
            self.unhold(node)

    def move_hold(self, req: Req, tokens: List[int]) -> None:
        """Deepen the request's lock after its prompt has been cached."""
        node, _ = self.walk(tokens)
        if node is req.node:
            return
        old = req.node
        req.node = self.hold(node)  # clean: near miss, the old hold is let go just after
        if old is not None:
            self.unhold(old)

    def warm(self, prompts: List[List[int]]) -> int:
        cached = 0
        for tokens in prompts:
            node, matched = self.walk(tokens)
            need = len(tokens) - matched
            if need == 0:
                continue
            kv = self.pool.alloc(need)  # leak: short prompts are skipped after their slots were taken
            if kv is None:
                break
            if need < 16:
                continue
            self.insert(node, tokens, kv)
            cached += 1
        return cached

    # -- eviction ------------------------------------------------------------

    def _leaves(self) -> List[Node]:
        out, stack = [], [self.root]
        while stack:
            cur = stack.pop()
            if cur.children:
                stack.extend(cur.children.values())
            elif cur is not self.root:
                out.append(cur)
        return out

    def evict(self, want: int) -> int:
        heap = [n for n in self._leaves() if n.lock_ref == 0]
        heapq.heapify(heap)
        done = 0
        while heap and done < want:
            node = heapq.heappop(heap)
            if node.value is not None:
                self.pool.free(node.value)
                done += node.value.numel()
            parent = node.parent
            if parent is not None:
                parent.children.pop(node.key[0], None)
                if not parent.children and parent is not self.root and parent.lock_ref == 0:
                    heapq.heappush(heap, parent)
        self.evicted += done
        return done
