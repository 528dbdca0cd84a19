from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .pools import RowPool, TokenPool
from .prefix import Node, PrefixTree


@dataclass(eq=False)
class Req:
    rid: str
    tokens: list[int]
    max_new: int
    row: int | None = None
    node: Node | None = None
    hit: int = 0
    slots: list[int] = field(default_factory=list)
    new: int = 0


class Scheduler:
    def __init__(self, rows: RowPool, pool: TokenPool, tree: PrefixTree) -> None:
        self.rows = rows
        self.pool = pool
        self.tree = tree
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []

    def _alloc(self, n: int) -> list[int] | None:
        got = self.pool.alloc(n)  # clean: near miss, None is tried again after eviction, else returned
        if got is None and self.tree.evict(n):
            got = self.pool.alloc(n)  # clean: near miss, overwrites None only
        return got

    def admit(self, req: Req) -> bool:
        node, hit = self.tree.match(req.tokens)
        self.tree.lock(node)  # clean: near miss, unlocked on both refusals, by finish, retract and abort
        row = self.rows.alloc()  # leak: without tokens the lock is undone and the row is not
        if row is None:
            self.tree.unlock(node)
            return False
        fresh = self._alloc(len(req.tokens) - len(hit))  # clean: near miss, kept in slots; freed or handed to the tree
        if fresh is None:
            self.tree.unlock(node)
            return False
        req.node, req.row, req.hit = node, row, len(hit)
        req.slots = hit + fresh
        self.rows.table[row, : len(req.slots)] = self.rows.table.new_tensor(req.slots)
        self.running.append(req)
        return True

    def fill(self) -> None:
        while self.waiting:
            if not self.admit(self.waiting[0]):
                return
            self.waiting.popleft()

    def decode(self) -> None:
        for req in list(self.running):
            got = self._alloc(1)  # leak: a request at the end of its row is finished with the new slot unplaced
            if got is None:
                self.retract(req)
                continue
            if len(req.slots) >= self.rows.table.shape[1]:
                self.finish(req)
                continue
            self.rows.table[req.row, len(req.slots)] = got[0]
            req.slots.extend(got)

    def _detach(self, req: Req) -> None:
        self.running.remove(req)
        if req.node is not None:
            self.tree.unlock(req.node)
            req.node = None
        if req.row is not None:
            self.rows.free(req.row)
            req.row = None

    def finish(self, req: Req) -> None:
        spare = self.tree.insert(req.tokens, req.slots)
        self.pool.free(spare)
        self.pool.free(req.slots[len(req.tokens) :])
        self._detach(req)
        req.slots = []

    def retract(self, req: Req) -> None:
        self.pool.free(req.slots[req.hit :])
        self._detach(req)
        req.slots, req.hit = [], 0
        self.waiting.appendleft(req)

    def abort(self, rid: str) -> None:
        for req in list(self.running):
            if req.rid == rid:
                self.pool.free(req.slots[req.hit :])
                self._detach(req)
                req.slots = []
        self.waiting = deque(r for r in self.waiting if r.rid != rid)
