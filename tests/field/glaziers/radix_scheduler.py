from __future__ import annotations

import enum
from typing import List, Optional, Tuple


class TreeNode:
    def __init__(self, parent: Optional[TreeNode] = None):
        self.parent = parent
        self.children: dict[int, TreeNode] = {}
        self.value: List[int] = []
        self.lock_ref = 0


class RadixCache:
    def __init__(self):
        self.root_node = TreeNode()

    def match_prefix(self, ids: List[int]) -> Tuple[List[int], TreeNode]:
        node, hit = self.root_node, []
        for t in ids:
            nxt = node.children.get(t)
            if nxt is None:
                break
            node = nxt
            hit.extend(node.value)
        return hit, node

    def insert(self, ids: List[int], locs: List[int]) -> int:
        node, dup = self.root_node, 0
        for t, loc in zip(ids, locs):
            if t in node.children:
                dup += 1
            else:
                node.children[t] = TreeNode(node)
                node.children[t].value = [loc]
            node = node.children[t]
        return dup

    def inc_lock_ref(self, node: TreeNode) -> None:
        while node is not self.root_node:
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        while node is not self.root_node:
            node.lock_ref -= 1
            node = node.parent


class SlotAllocator:
    def __init__(self, size: int):
        self.free_slots = list(range(size))

    def alloc(self, need: int) -> Optional[List[int]]:
        if need > len(self.free_slots):
            return None
        out, self.free_slots = self.free_slots[:need], self.free_slots[need:]
        return out

    def free(self, slots: List[int]) -> None:
        self.free_slots = self.free_slots + slots


class Req:
    def __init__(self, rid: str, ids: List[int]):
        self.rid = rid
        self.ids = ids
        self.prefix: List[int] = []
        self.last_node: Optional[TreeNode] = None
        self.row: Optional[int] = None
        self.locs: List[int] = []
        self.computed = 0
        self.to_abort = False


class AddResult(enum.Enum):
    CONTINUE = 0
    NO_TOKEN = 1


class Scheduler:
    def __init__(self, rows: int, tokens: int, chunk: int):
        self.tree = RadixCache()
        self.rows = SlotAllocator(rows)
        self.kv = SlotAllocator(tokens)
        self.chunk = chunk
        self.running: List[Req] = []
        self.chunked: Optional[Req] = None

    def add_one_req(self, req: Req, can_run: List[Req]) -> AddResult:
        req.prefix, req.last_node = self.tree.match_prefix(req.ids)
        self.tree.inc_lock_ref(req.last_node)  # leak: abort_running frees the row and tokens but leaves the node locked
        if len(req.ids) - len(req.prefix) > len(self.kv.free_slots):
            self.tree.dec_lock_ref(req.last_node)
            return AddResult.NO_TOKEN
        can_run.append(req)
        return AddResult.CONTINUE

    def prepare_for_extend(self, reqs: List[Req]) -> bool:
        rows = self.rows.alloc(len(reqs))  # leak: no room for the tokens returns with the rows taken
        if rows is None:
            return False
        extend = sum(len(r.ids) - len(r.prefix) for r in reqs)
        locs = self.kv.alloc(extend)  # clean: cut up into the requests' own lists
        if locs is None:
            return False
        pos = 0
        for req, row in zip(reqs, rows):
            n = len(req.ids) - len(req.prefix)
            req.row = row
            req.locs = locs[pos:pos + n]
            pos += n
        self.running.extend(reqs)
        return True

    def start_chunked(self, req: Req) -> bool:
        if self.chunked is not None:
            return False
        row = self.rows.alloc(1)  # clean: near miss, freed when the first chunk does not fit
        if row is None:
            return False
        locs = self.kv.alloc(min(self.chunk, len(req.ids)))  # clean: the request's, freed with it when finished, retracted or aborted
        if locs is None:
            self.rows.free(row)
            return False
        req.row, req.locs = row[0], locs
        req.computed = len(locs)
        self.chunked = req
        return True

    def continue_chunked(self) -> bool:
        req = self.chunked
        if req is None:
            return False
        left = len(req.ids) - req.computed
        more = self.kv.alloc(min(self.chunk, left))  # leak: replaces the slots of the chunks before it
        if more is None:
            return False
        req.locs = more
        req.computed += len(more)
        if left <= self.chunk:
            self.running.append(req)
            self.chunked = None
        return True

    def prepare_for_decode(self) -> None:
        while (locs := self.kv.alloc(len(self.running))) is None:  # clean: near miss, tries again only when None came back
            self.retract(self.running[-1])
        for req, loc in zip(self.running, locs):
            req.locs.append(loc)

    def retract(self, req: Req) -> None:
        self.running.remove(req)
        self._free_req(req)
        if req.last_node is not None:
            self.tree.dec_lock_ref(req.last_node)
            req.last_node = None

    def _free_req(self, req: Req) -> None:
        self.kv.free(req.locs)
        req.locs = []
        if req.row is not None:
            self.rows.free([req.row])
            req.row = None

    def abort_running(self) -> None:
        for req in [r for r in self.running if r.to_abort]:
            self.running.remove(req)
            self._free_req(req)

    def rescore(self, ids: List[int], fn) -> Optional[float]:
        prefix, node = self.tree.match_prefix(ids)
        self.tree.inc_lock_ref(node)  # clean: near miss, unlocked in the finally
        try:
            tmp = self.kv.alloc(len(ids) - len(prefix))  # clean: near miss, None holds nothing, else freed after fn
            if tmp is None:
                return None
            score = fn(prefix + tmp)
            self.kv.free(tmp)
            return score
        finally:
            self.tree.dec_lock_ref(node)

    def process_finished(self, req: Req) -> None:
        self.running.remove(req)
        locs = req.prefix + req.locs
        dup = self.tree.insert(req.ids, locs)
        self.kv.free(locs[len(req.prefix):dup])
        tail = max(dup, len(req.ids))
        self.kv.free(locs[tail:])
        self.rows.free([req.row])
        req.row, req.locs = None, []
        if req.last_node is not None:
            self.tree.dec_lock_ref(req.last_node)
            req.last_node = None
