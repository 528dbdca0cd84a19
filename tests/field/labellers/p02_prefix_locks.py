"""Prefix tree whose nodes are protected from eviction by lock references."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple


@dataclass
class TreeNode:
    key: Tuple[int, ...] = ()
    parent: Optional["TreeNode"] = None
    children: Dict[int, "TreeNode"] = field(default_factory=dict)
    lock_ref: int = 0
    host_only: bool = False


class PrefixTree:
    def __init__(self) -> None:
        self.root = TreeNode()
    def match(self, tokens: List[int]) -> TreeNode:
        node = self.root
        for tok in tokens:
            nxt = node.children.get(tok)
            if nxt is None:
                break
            node = nxt
        return node
    def insert(self, tokens: List[int]) -> TreeNode:
        node = self.root
        for tok in tokens:
            if tok not in node.children:
                node.children[tok] = TreeNode(node.key + (tok,), node)
            node = node.children[tok]
        return node
    def inc_lock_ref(self, node: TreeNode) -> None:
        while node is not None and node is not self.root:
            node.lock_ref += 1
            node = node.parent
    def dec_lock_ref(self, node: TreeNode) -> None:
        while node is not None and node is not self.root:
            node.lock_ref -= 1
            node = node.parent


@dataclass
class Req:
    rid: str
    origin_ids: List[int]
    output_ids: List[int] = field(default_factory=list)
    last_node: Optional[TreeNode] = None
    window_node: Optional[TreeNode] = None
    window_locked: bool = False


class CacheController:
    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.ongoing_loads: Dict[str, TreeNode] = {}
        self.ongoing_writes: Dict[int, TreeNode] = {}
        self.next_ticket = 0
    def cache_unfinished(self, req: Req) -> None:
        new_node = self.tree.insert(req.origin_ids + req.output_ids)
        self.tree.inc_lock_ref(new_node)  # clean: near miss, the old node is released first and the new one takes its place in the request
        if req.last_node is not None:
            self.tree.dec_lock_ref(req.last_node)
        req.last_node = new_node
    def cache_chunk(self, req: Req, chunk: List[int]) -> None:
        node = self.tree.insert(chunk)
        self.tree.inc_lock_ref(node)  # leak: last_node of the earlier chunk is replaced while still locked
        req.last_node = node
    def cache_finished(self, req: Req) -> None:
        if req.last_node is not None:
            self.tree.dec_lock_ref(req.last_node)
            req.last_node = None
    def write_through(self, tokens: List[int]) -> int:
        node = self.tree.match(tokens)
        self.next_ticket += 1
        self.tree.inc_lock_ref(node)  # clean: kept in ongoing_writes, unlocked by drain_writes
        self.ongoing_writes[self.next_ticket] = node
        return self.next_ticket

    def drain_writes(self, acks: List[int]) -> None:
        for ticket in acks:
            node = self.ongoing_writes.pop(ticket, None)
            if node is not None:
                self.tree.dec_lock_ref(node)

    def load_back(self, rid: str, tokens: List[int], budget: int) -> Optional[TreeNode]:
        node = self.tree.match(tokens)
        self.tree.inc_lock_ref(node)  # leak: the over-budget return keeps the node locked
        if not node.host_only:
            self.tree.dec_lock_ref(node)
            return node
        if len(node.key) > budget:
            return None
        self.ongoing_loads[rid] = node
        return node

    def finish_loads(self) -> None:
        for rid in list(self.ongoing_loads):
            node = self.ongoing_loads.pop(rid)
            node.host_only = False
            self.tree.dec_lock_ref(node)


class PrefillAdder:
    def __init__(self, tree: PrefixTree, budget: int) -> None:
        self.tree = tree
        self.budget = budget
        self.can_run: List[Req] = []

    def try_add(self, req: Req, need: int) -> bool:
        if req.last_node is not None:
            return False
        node = self.tree.match(req.origin_ids)
        self.tree.inc_lock_ref(node)  # clean: near miss, unlocked in finally unless the request took it over
        taken = False
        try:
            if need > self.budget:
                return False
            req.last_node = node
            self.can_run.append(req)
            self.budget -= need
            taken = True
            return True
        finally:
            if not taken:
                self.tree.dec_lock_ref(node)

    def estimate(self, reqs: List[Req]) -> int:
        total = 0
        for req in reqs:
            node = self.tree.match(req.origin_ids)
            self.tree.inc_lock_ref(node)  # leak: requests with an empty match tail skip the unlock via continue
            rest = len(req.origin_ids) - len(node.key)
            if rest == 0:
                continue
            total += rest
            self.tree.dec_lock_ref(node)
        return total

    def retract(self) -> List[Req]:
        out, self.can_run = self.can_run, []
        for req in out:
            if req.last_node is not None:
                self.tree.dec_lock_ref(req.last_node)
                req.last_node = None
        return out


def hold_window(tree: PrefixTree, req: Req, node: TreeNode, window: int) -> None:
    if window > 0 and not req.window_locked:
        tree.inc_lock_ref(node)  # clean: near miss, window_locked remembers the lock and drop_window tests it
        req.window_node, req.window_locked = node, True


def drop_window(tree: PrefixTree, req: Req) -> None:
    if req.window_locked:
        tree.dec_lock_ref(req.window_node)
        req.window_node, req.window_locked = None, False
