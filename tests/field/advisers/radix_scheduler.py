"""Prefill and decode bookkeeping over a radix prefix cache."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch


class TreeNode:
    def __init__(self, parent: Optional[TreeNode] = None) -> None:
        self.parent = parent
        self.children: dict[int, TreeNode] = {}
        self.value: torch.Tensor | None = None
        self.lock_ref = 0


class TokenToKVPool:
    def __init__(self, size: int) -> None:
        self.free_slots = torch.arange(1, size + 1, dtype=torch.int64)

    def available_size(self) -> int:
        return self.free_slots.numel()

    def alloc(self, need: int) -> torch.Tensor | None:
        if need > self.free_slots.numel():
            return None
        out = self.free_slots[:need]
        self.free_slots = self.free_slots[need:]
        return out

    def free(self, indices: torch.Tensor) -> None:
        if indices.numel():
            self.free_slots = torch.cat((self.free_slots, indices))


class ReqToTokenPool:
    def __init__(self, size: int, max_len: int) -> None:
        self.req_to_token = torch.zeros(size, max_len, dtype=torch.int64)
        self.free_rows = list(range(size))

    def alloc_row(self) -> int | None:
        return self.free_rows.pop() if self.free_rows else None

    def free_row(self, row: int) -> None:
        self.free_rows.append(row)


@dataclass
class Req:
    rid: str
    input_ids: list[int]
    kv_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    prefix_len: int = 0
    row: int | None = None
    last_node: TreeNode | None = None
    draft_kv: torch.Tensor | None = None


class RadixCache:
    def __init__(self, kv_pool: TokenToKVPool) -> None:
        self.root = TreeNode()
        self.kv_pool = kv_pool

    def match_prefix(self, ids: list[int]) -> tuple[TreeNode, torch.Tensor]:
        node, values = self.root, []
        for tok in ids:
            child = node.children.get(tok)
            if child is None:
                break
            values.append(child.value)
            node = child
        return node, torch.cat(values) if values else torch.empty(0, dtype=torch.int64)

    def insert(self, ids: list[int], indices: torch.Tensor) -> tuple[TreeNode, int]:
        node, have = self.match_prefix(ids)[0], len(self.match_prefix(ids)[1])
        for pos in range(have, len(ids)):
            child = TreeNode(node)
            child.value = indices[pos : pos + 1]
            node.children[ids[pos]] = child
            node = child
        return node, have

    def inc_lock_ref(self, node: TreeNode) -> None:
        while node is not None:
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        while node is not None:
            node.lock_ref -= 1
            node = node.parent


class Scheduler:
    def __init__(self, kv_pool: TokenToKVPool, req_pool: ReqToTokenPool, tree: RadixCache) -> None:
        self.kv_pool = kv_pool
        self.req_pool = req_pool
        self.tree = tree
        self.running: list[Req] = []
        self.dummy_kv = kv_pool.alloc(1)  # clean: padding slot, kept by the scheduler on purpose

    def add_prefill(self, req: Req) -> bool:
        node, prefix = self.tree.match_prefix(req.input_ids)
        self.tree.inc_lock_ref(node)  # leak: the return for lack of kv slots frees the row but leaves the node locked
        row = self.req_pool.alloc_row()  # clean: near miss, freed when kv slots lack, else kept in req.row
        if row is None:
            self.tree.dec_lock_ref(node)
            return False
        fresh = self.kv_pool.alloc(len(req.input_ids) - len(prefix))  # clean: stored in req.kv_indices
        if fresh is None:
            self.req_pool.free_row(row)
            return False
        req.row, req.last_node, req.prefix_len = row, node, len(prefix)
        req.kv_indices = torch.cat((prefix, fresh))
        self.running.append(req)
        return True

    def prepare_decode(self) -> list[Req]:
        retracted: list[Req] = []
        while self.running and self.kv_pool.available_size() < len(self.running):
            victim = self.running.pop()
            self.release_req(victim)
            retracted.append(victim)
        slots = self.kv_pool.alloc(len(self.running))  # clean: one slot for each running request, appended to its indices
        for i, req in enumerate(self.running):
            req.kv_indices = torch.cat((req.kv_indices, slots[i : i + 1]))
        return retracted

    def release_req(self, req: Req) -> None:
        self.kv_pool.free(req.kv_indices[req.prefix_len :])
        self.req_pool.free_row(req.row)
        self.tree.dec_lock_ref(req.last_node)
        req.row = req.last_node = None

    def verify_draft(self, req: Req, accepted: torch.Tensor) -> bool:
        slots = self.kv_pool.alloc(accepted.numel())  # clean: near miss, accepted ones join the request, the others are freed
        if slots is None:
            return False
        req.kv_indices = torch.cat((req.kv_indices, slots[accepted]))
        self.kv_pool.free(slots[~accepted])
        return bool(accepted.all())

    def verify_tree(self, req: Req, path: list[int], width: int) -> bool:
        slots = self.kv_pool.alloc(width)  # leak: with an empty path the early return frees none of them
        if slots is None:
            return False
        if not path:
            return False
        keep = torch.zeros(width, dtype=torch.bool)
        keep[path] = True
        req.kv_indices = torch.cat((req.kv_indices, slots[keep]))
        self.kv_pool.free(slots[~keep])
        return True

    def reserve_draft(self, req: Req, k: int) -> bool:
        if k > self.kv_pool.available_size():
            return False
        req.draft_kv = self.kv_pool.alloc(k)  # leak: release_req and finish never free draft_kv, and the next reservation overwrites it
        return True

    def cache_unfinished(self, req: Req) -> None:
        node, have = self.tree.insert(req.input_ids, req.kv_indices)
        self.kv_pool.free(req.kv_indices[req.prefix_len : have])
        self.tree.inc_lock_ref(node)  # clean: near miss, the lock on the former last_node is dropped in the next line
        self.tree.dec_lock_ref(req.last_node)
        req.last_node = node
        _, values = self.tree.match_prefix(req.input_ids)
        req.kv_indices = torch.cat((values, req.kv_indices[len(values) :]))
        req.prefix_len = len(values)

    def rebase(self, req: Req, ids: list[int]) -> int:
        node, values = self.tree.match_prefix(ids)
        self.tree.inc_lock_ref(node)  # leak: overwrites last_node, whose own lock is never dropped
        req.last_node = node
        return len(values)

    def finish(self, req: Req) -> None:
        _, have = self.tree.insert(req.input_ids, req.kv_indices)
        self.kv_pool.free(req.kv_indices[req.prefix_len : have])
        self.kv_pool.free(req.kv_indices[len(req.input_ids) :])
        self.req_pool.free_row(req.row)
        self.tree.dec_lock_ref(req.last_node)
        self.running.remove(req)

    def abort(self, rid: str) -> bool:
        for req in self.running:
            if req.rid == rid:
                self.release_req(req)
                self.running.remove(req)
                return True
        return False

    def pin_system_prompt(self, ids: list[int]) -> TreeNode | None:
        node, values = self.tree.match_prefix(ids)
        self.tree.inc_lock_ref(node)  # clean: near miss, unlocked when the match is partial, else handed to the caller for unpin
        if len(values) < len(ids):
            self.tree.dec_lock_ref(node)
            return None
        return node

    def unpin(self, node: TreeNode) -> None:
        self.tree.dec_lock_ref(node)

    def prefix_report(self, prompts: list[list[int]], enough: int = 8) -> int:
        hits = 0
        for ids in prompts:
            node = self.pin_system_prompt(ids)  # leak: the break upon the last hit that is wanted leaves its node pinned
            if node is None:
                continue
            hits += 1
            if hits == enough:
                break
            self.unpin(node)
        return hits
