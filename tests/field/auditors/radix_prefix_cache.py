from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Optional, Sequence


class TokenSlotPool:
    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def alloc(self, need: int) -> Optional[list[int]]:
        if need > len(self._free):
            return None
        taken, self._free = self._free[:need], self._free[need:]
        return taken

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)

    def available(self) -> int:
        return len(self._free)


class ReqRowTable:
    def __init__(self, rows: int) -> None:
        self._rows = list(range(rows))

    def alloc_row(self) -> Optional[int]:
        return self._rows.pop() if self._rows else None

    def free_row(self, row: int) -> None:
        self._rows.append(row)


class TreeNode:
    def __init__(self, parent: Optional[TreeNode] = None) -> None:
        self.parent = parent
        self.children: dict[int, TreeNode] = {}
        self.key: tuple[int, ...] = ()
        self.slots: list[int] = []
        self.lock_ref = 0
        self.last_access = time.monotonic()

    def __lt__(self, other: TreeNode) -> bool:
        return self.last_access < other.last_access


class RadixCache:
    def __init__(self, pool: TokenSlotPool) -> None:
        self.pool = pool
        self.root = TreeNode()

    def match_prefix(self, tokens: Sequence[int]) -> tuple[TreeNode, list[int]]:
        node, pos, slots = self.root, 0, []
        while pos < len(tokens):
            child = node.children.get(tokens[pos])
            if child is None or tuple(tokens[pos : pos + len(child.key)]) != child.key:
                break
            slots.extend(child.slots)
            pos += len(child.key)
            node = child
            node.last_access = time.monotonic()
        return node, slots

    def inc_lock_ref(self, node: TreeNode) -> None:
        while node.parent is not None:
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        while node.parent is not None:
            node.lock_ref -= 1
            node = node.parent

    def insert(self, parent: TreeNode, key: Sequence[int], slots: list[int]) -> TreeNode:
        if not key or key[0] in parent.children:
            self.pool.free(slots)
            return parent
        node = TreeNode(parent)
        node.key, node.slots = tuple(key), slots
        parent.children[key[0]] = node
        return node

    def evict(self, need: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.lock_ref == 0]
        heapq.heapify(leaves)
        done = 0
        while leaves and done < need:
            node = heapq.heappop(leaves)
            if node.parent is None:
                continue
            self.pool.free(node.slots)
            done += len(node.slots)
            del node.parent.children[node.key[0]]
        return done

    def _walk(self, node: TreeNode) -> list[TreeNode]:
        out = [node]
        for child in node.children.values():
            out.extend(self._walk(child))
        return out


@dataclass
class Req:
    rid: str
    tokens: list[int]
    node: Optional[TreeNode] = None
    prefix_len: int = 0
    own_slots: list[int] = field(default_factory=list)
    row: Optional[int] = None


class PrefillAdder:
    def __init__(self, cache: RadixCache, rows: ReqRowTable) -> None:
        self.cache = cache
        self.rows = rows

    def _alloc_evicting(self, need: int) -> Optional[list[int]]:
        slots = self.cache.pool.alloc(need)  # clean: returned to the caller
        if slots is None and self.cache.evict(need) > 0:
            slots = self.cache.pool.alloc(need)  # clean: near miss, only runs when the first allocation gave nothing
        return slots

    def add_request(self, req: Req) -> bool:
        node, prefix = self.cache.match_prefix(req.tokens)
        self.cache.inc_lock_ref(node)  # clean: near miss, dropped on both refusals and otherwise held as req.node
        row = self.rows.alloc_row()  # leak: when no token slots are left the request is refused with its row still taken
        if row is None:
            self.cache.dec_lock_ref(node)
            return False
        slots = self._alloc_evicting(len(req.tokens) - len(prefix))  # clean: held as req.own_slots until finish or retract
        if slots is None:
            self.cache.dec_lock_ref(node)
            return False
        req.node, req.prefix_len, req.own_slots, req.row = node, len(prefix), slots, row
        return True

    def probe(self, tokens: Sequence[int], budget: int) -> int:
        node, prefix = self.cache.match_prefix(tokens)
        self.cache.inc_lock_ref(node)  # leak: a prompt over budget returns 0 with the path still locked
        missing = len(tokens) - len(prefix)
        if missing > budget:
            return 0
        room = self.cache.pool.available()
        self.cache.dec_lock_ref(node)
        return min(room, missing)

    def extend_decode(self, batch: list[Req]) -> list[Req]:
        stalled: list[Req] = []
        for req in batch:
            slot = self._alloc_evicting(1)  # clean: near miss, None holds nothing and a slot joins own_slots
            if slot is None:
                stalled.append(req)
                continue
            req.own_slots.extend(slot)
        return stalled

    def cache_unfinished(self, req: Req) -> None:
        assert req.node is not None
        key = req.tokens[req.prefix_len : req.prefix_len + len(req.own_slots)]
        node = self.cache.insert(req.node, key, req.own_slots)
        self.cache.inc_lock_ref(node)  # clean: near miss, the old lock is dropped right after and req.node takes this one over
        self.cache.dec_lock_ref(req.node)
        req.node, req.own_slots = node, []
        req.prefix_len += len(key)

    def draft_tokens(self, req: Req, k: int, accepted: int) -> int:
        draft = self.cache.pool.alloc(k)  # leak: only the accepted part is kept, the slots of rejected drafts are dropped
        if draft is None:
            return 0
        req.own_slots += draft[:accepted]
        return accepted

    def finish(self, req: Req) -> None:
        assert req.node is not None and req.row is not None
        key = req.tokens[req.prefix_len : req.prefix_len + len(req.own_slots)]
        self.cache.insert(req.node, key, req.own_slots)
        self.cache.dec_lock_ref(req.node)
        self.rows.free_row(req.row)
        req.node, req.own_slots, req.row = None, [], None

    def retract(self, req: Req) -> None:
        self.cache.pool.free(req.own_slots)
        assert req.node is not None and req.row is not None
        self.cache.dec_lock_ref(req.node)
        self.rows.free_row(req.row)
        req.node, req.own_slots, req.row = None, [], None


def run_dummy(adder: PrefillAdder, size: int) -> bool:
    row = adder.rows.alloc_row()  # leak: when the pool cannot serve the dummy batch the row is not freed
    if row is None:
        return False
    slots = adder.cache.pool.alloc(size)  # clean: freed at the end, None holds nothing
    if slots is None:
        return False
    adder.cache.pool.free(slots)
    adder.rows.free_row(row)
    return True
