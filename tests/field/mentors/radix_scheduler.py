"""Radix-tree prefix cache with node locks, and the scheduler paths that use it."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch


class TokenToKVPool:
    def __init__(self, size: int) -> None:
        self.size = size
        self.free_slots = torch.arange(1, size + 1, dtype=torch.int64)

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, need: int) -> Optional[torch.Tensor]:
        if need > len(self.free_slots):
            return None
        out, self.free_slots = self.free_slots[:need], self.free_slots[need:]
        return out

    def free(self, index: torch.Tensor) -> None:
        if index.numel():
            self.free_slots = torch.cat((self.free_slots, index))


class ReqToTokenPool:
    def __init__(self, size: int, max_len: int) -> None:
        self.table = torch.zeros((size, max_len), dtype=torch.int64)
        self.rows = list(range(size))

    def alloc(self) -> Optional[int]:
        return self.rows.pop() if self.rows else None

    def free(self, row: int) -> None:
        self.rows.append(row)


class TreeNode:
    def __init__(self, parent: Optional["TreeNode"] = None) -> None:
        self.children: dict[int, TreeNode] = {}
        self.parent = parent
        self.value: Optional[torch.Tensor] = None
        self.lock_ref = 0


class RadixCache:
    def __init__(self, kv: TokenToKVPool) -> None:
        self.root = TreeNode()
        self.kv = kv

    def match(self, tokens: list[int]) -> tuple[list[torch.Tensor], TreeNode]:
        node, hit = self.root, []
        for t in tokens:
            nxt = node.children.get(t)
            if nxt is None or nxt.value is None:
                break
            hit.append(nxt.value)
            node = nxt
        return hit, node

    def insert(self, tokens: list[int], slots: torch.Tensor) -> TreeNode:
        """Takes ownership of slots; what the tree has already is freed."""
        node = self.root
        for i, t in enumerate(tokens):
            nxt = node.children.get(t)
            if nxt is None:
                nxt = node.children[t] = TreeNode(node)
                nxt.value = slots[i : i + 1]
            elif int(nxt.value) != int(slots[i]):
                self.kv.free(slots[i : i + 1])
            node = nxt
        return node

    def inc_lock_ref(self, node: TreeNode) -> None:
        while node is not self.root:
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        while node is not self.root:
            node.lock_ref -= 1
            node = node.parent

    def evict(self, want: int) -> int:
        freed, stack = 0, [self.root]
        leaves: list[tuple[int, TreeNode]] = []
        while stack:
            n = stack.pop()
            for key, c in n.children.items():
                stack.append(c)
                if not c.children and c.lock_ref == 0:
                    leaves.append((key, c))
        for key, leaf in leaves[:want]:
            self.kv.free(leaf.value)
            del leaf.parent.children[key]
            freed += 1
        return freed


@dataclass
class Req:
    rid: str
    input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    row: Optional[int] = None
    last_node: Optional[TreeNode] = None
    prefix_len: int = 0
    slots: Optional[torch.Tensor] = None


class Scheduler:
    def __init__(self, kv: TokenToKVPool, rows: ReqToTokenPool) -> None:
        self.kv = kv
        self.rows = rows
        self.cache = RadixCache(kv)
        self.running: list[Req] = []
        self.waiting: list[Req] = []
        self.chunked: Optional[Req] = None

    def _alloc_or_evict(self, need: int) -> Optional[torch.Tensor]:
        out = self.kv.alloc(need)  # clean: returned, or None
        if out is None:
            self.cache.evict(need - self.kv.available_size())
            out = self.kv.alloc(need)  # clean: near miss, the first try gave nothing
        return out

    def prefill(self, req: Req) -> bool:
        hit, node = self.cache.match(req.input_ids)
        self.cache.inc_lock_ref(node)  # leak: not undone when there are no slots for the rest
        row = self.rows.alloc()  # clean: near miss, freed on the out-of-slots return, else stored in the request
        if row is None:
            self.cache.dec_lock_ref(node)
            return False
        fresh = self._alloc_or_evict(len(req.input_ids) - len(hit))  # clean: part of req.slots
        if fresh is None:
            self.rows.free(row)
            return False
        req.slots = torch.cat([*hit, fresh])
        req.row, req.last_node, req.prefix_len = row, node, len(hit)
        self.rows.table[row, : len(req.slots)] = req.slots
        self.running.append(req)
        return True

    def start_chunk(self, req: Req, chunk: int) -> bool:
        if self.chunked is not None:
            return False
        row = self.rows.alloc()  # leak: kept by nobody when the chunk's slots are refused
        if row is None:
            return False
        slots = self._alloc_or_evict(chunk)  # clean: goes into req.slots, or None
        if slots is None:
            return False
        req.row, req.slots = row, slots
        req.last_node = self.cache.root
        self.chunked = req
        return True

    def decode_step(self, req: Req, token: int) -> bool:
        slot = self._alloc_or_evict(1)  # clean: appended to the request's slots
        if slot is None:
            self.retract(req)
            return False
        self.rows.table[req.row, len(req.slots)] = slot[0]
        req.slots = torch.cat((req.slots, slot))
        req.output_ids.append(token)
        return True

    def verify_draft(self, req: Req, draft: list[int], accepted: int) -> None:
        slots = self._alloc_or_evict(len(draft))  # leak: only the accepted part is kept and the rejected slots are not freed
        if slots is None:
            return
        req.slots = torch.cat((req.slots, slots[:accepted]))
        req.output_ids.extend(draft[:accepted])

    def verify_tree(self, req: Req, draft: list[int], accepted: int) -> None:
        slots = self._alloc_or_evict(len(draft))  # clean: near miss, the rejected tail is freed
        if slots is None:
            return
        keep, drop = slots[:accepted], slots[accepted:]
        self.kv.free(drop)
        req.slots = torch.cat((req.slots, keep))
        req.output_ids.extend(draft[:accepted])

    def cache_unfinished(self, req: Req) -> None:
        node = self.cache.insert(req.input_ids, req.slots[: len(req.input_ids)])
        hit, _ = self.cache.match(req.input_ids)
        req.slots = torch.cat([*hit, req.slots[len(req.input_ids) :]])
        self.cache.inc_lock_ref(node)  # clean: near miss, the lock of the old node is released, the new one is the request's
        self.cache.dec_lock_ref(req.last_node)
        req.last_node, req.prefix_len = node, len(hit)

    def rematch(self, req: Req) -> int:
        hit, node = self.cache.match(req.input_ids)
        if len(hit) <= req.prefix_len:
            return req.prefix_len
        self.cache.inc_lock_ref(node)  # leak: the lock on the previous last_node is overwritten
        req.last_node = node
        self.kv.free(req.slots[req.prefix_len : len(hit)])
        req.slots = torch.cat([*hit, req.slots[len(hit) :]])
        req.prefix_len = len(hit)
        return req.prefix_len

    def retract(self, req: Req) -> None:
        self.running.remove(req)
        self.kv.free(req.slots[req.prefix_len :])
        self.rows.free(req.row)
        self.cache.dec_lock_ref(req.last_node)
        req.row = req.slots = req.last_node = None
        self.waiting.insert(0, req)

    def finish(self, req: Req) -> None:
        self.running.remove(req)
        tokens = (req.input_ids + req.output_ids)[: len(req.slots)]
        self.cache.insert(tokens, req.slots)
        self.cache.dec_lock_ref(req.last_node)
        self.rows.free(req.row)

    def abort_chunked(self) -> None:
        req = self.chunked
        if req is None:
            return
        self.kv.free(req.slots)
        if req.row is not None:
            self.rows.free(req.row)
        self.chunked = None

    def promote_chunked(self) -> None:
        if self.chunked is not None:
            self.running.append(self.chunked)
            self.chunked = None
