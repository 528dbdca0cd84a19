"""Radix-tree prefix cache with lock references and request slots."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch


class TreeNode:
    def __init__(self, parent: Optional["TreeNode"] = None) -> None:
        self.children: dict[int, TreeNode] = {}
        self.parent = parent
        self.key: list[int] = []
        self.value: Optional[torch.Tensor] = None
        self.lock_ref = 0


@dataclass
class Req:
    rid: str
    input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    req_pool_idx: Optional[int] = None
    out_loc: Optional[torch.Tensor] = None
    last_node: Optional[TreeNode] = None


class ReqToTokenPool:
    def __init__(self, size: int, max_context: int) -> None:
        self.table = torch.zeros(size, max_context, dtype=torch.int32)
        self.free_slots = list(range(size))

    def alloc_slot(self) -> Optional[int]:
        if not self.free_slots:
            return None
        return self.free_slots.pop(0)

    def free_slot(self, idx: int) -> None:
        self.free_slots.append(idx)


class TokenKVAllocator:
    def __init__(self, size: int) -> None:
        self.free_pages = torch.arange(1, size + 1, dtype=torch.int64)

    def alloc_tokens(self, need: int) -> Optional[torch.Tensor]:
        if need > len(self.free_pages):
            return None
        picked, self.free_pages = self.free_pages[:need], self.free_pages[need:]
        return picked

    def free_tokens(self, loc: torch.Tensor) -> None:
        self.free_pages = torch.cat([self.free_pages, loc])


class RadixCache:
    def __init__(self) -> None:
        self.root = TreeNode()

    def match(self, ids: list[int]) -> TreeNode:
        node = self.root
        for token in ids:
            child = node.children.get(token)
            if child is None:
                break
            node = child
        return node

    def inc_lock_ref(self, node: TreeNode) -> None:
        current: Optional[TreeNode] = node
        while current is not None:
            current.lock_ref += 1
            current = current.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        current: Optional[TreeNode] = node
        while current is not None:
            current.lock_ref -= 1
            current = current.parent


class ScheduleBatcher:
    def __init__(self, slots: ReqToTokenPool, tokens: TokenKVAllocator, tree: RadixCache) -> None:
        self.slots = slots
        self.tokens = tokens
        self.tree = tree
        self.running: list[Req] = []
        self.chunked: Optional[Req] = None

    def add_prefill(self, req: Req) -> bool:
        node = self.tree.match(req.input_ids)
        idx = self.slots.alloc_slot()  # clean: near miss, freed when tokens run short, else kept by the request until _free_req
        if idx is None:
            return False
        loc = self.tokens.alloc_tokens(len(req.input_ids))  # clean: kept by the request until _free_req
        if loc is None:
            self.slots.free_slot(idx)
            return False
        self.tree.inc_lock_ref(node)  # clean: near miss, taken after the last refusal, last_node is unlocked in _free_req
        req.req_pool_idx, req.out_loc, req.last_node = idx, loc, node
        self.running.append(req)
        return True

    def add_chunked(self, req: Req, chunk: int) -> bool:
        if self.chunked is not None:
            return False
        node = self.tree.match(req.input_ids)
        self.tree.inc_lock_ref(node)  # leak: the refusals below leave the path locked
        idx = self.slots.alloc_slot()  # leak: the slot is forgotten when the tokens of the chunk run short
        if idx is None:
            return False
        loc = self.tokens.alloc_tokens(min(chunk, len(req.input_ids)))  # clean: kept by the request until _free_req
        if loc is None:
            return False
        req.req_pool_idx, req.out_loc, req.last_node = idx, loc, node
        self.chunked = req
        return True

    def continue_chunk(self, chunk: int) -> bool:
        req = self.chunked
        if req is None or req.out_loc is None:
            return False
        more = self.tokens.alloc_tokens(chunk)  # clean: near miss, appended to out_loc which the request frees as a whole
        if more is None:
            return False
        req.out_loc = torch.cat([req.out_loc, more])
        if len(req.out_loc) >= len(req.input_ids):
            self.running.append(req)
            self.chunked = None
        return True

    def decode_step(self, next_ids: dict[str, int], eos: int) -> list[Req]:
        finished: list[Req] = []
        for req in list(self.running):
            loc = self.tokens.alloc_tokens(1)  # leak: a request that ends at this token never gets it into out_loc
            if loc is None:
                self.retract(req)
                continue
            token = next_ids[req.rid]
            req.output_ids.append(token)
            if token == eos:
                self.running.remove(req)
                self._free_req(req)
                finished.append(req)
                continue
            assert req.out_loc is not None
            req.out_loc = torch.cat([req.out_loc, loc])
        return finished

    def speculative_step(self, req: Req, draft: list[int], accepted: int) -> bool:
        loc = self.tokens.alloc_tokens(len(draft))  # clean: near miss, accepted part goes to out_loc, the rest straight back
        if loc is None or req.out_loc is None:
            return self._give_up_draft(loc)
        req.output_ids.extend(draft[:accepted])
        req.out_loc = torch.cat([req.out_loc, loc[:accepted]])
        self.tokens.free_tokens(loc[accepted:])
        return True

    def _give_up_draft(self, loc: Optional[torch.Tensor]) -> bool:
        if loc is not None:
            self.tokens.free_tokens(loc)
        return False

    def tree_verify(self, req: Req, width: int, accepted: int) -> bool:
        loc = self.tokens.alloc_tokens(width)  # leak: off by one, the token between the accepted part and the rest is lost
        if loc is None:
            return False
        assert req.out_loc is not None
        req.out_loc = torch.cat([req.out_loc, loc[:accepted]])
        self.tokens.free_tokens(loc[accepted + 1 :])
        return True

    def move_lock(self, req: Req) -> None:
        node = self.tree.match(req.input_ids + req.output_ids)
        if node is req.last_node:
            return
        self.tree.inc_lock_ref(node)  # clean: near miss, the old node is unlocked and the new one becomes last_node
        if req.last_node is not None:
            self.tree.dec_lock_ref(req.last_node)
        req.last_node = node

    def retract(self, req: Req) -> None:
        self.running.remove(req)
        self._free_req(req)
        req.output_ids.clear()

    def abort(self, rid: str) -> bool:
        if self.chunked is not None and self.chunked.rid == rid:
            self._free_req(self.chunked)
            self.chunked = None
            return True
        for req in self.running:
            if req.rid == rid:
                self.running.remove(req)
                self._free_req(req)
                return True
        return False

    def _free_req(self, req: Req) -> None:
        if req.req_pool_idx is not None:
            self.slots.free_slot(req.req_pool_idx)
            req.req_pool_idx = None
        if req.out_loc is not None:
            self.tokens.free_tokens(req.out_loc)
            req.out_loc = None
        if req.last_node is not None:
            self.tree.dec_lock_ref(req.last_node)
            req.last_node = None
