from __future__ import annotations

import torch

from .pools import RowPool, TokenPool
from .prefix import Node, PrefixTree
from .scheduler import Req, Scheduler


class Engine:
    def __init__(self, model: torch.nn.Module, rows: int, max_len: int, tokens: int) -> None:
        self.model = model
        self.rows = RowPool(rows, max_len)
        self.pool = TokenPool(tokens)
        self.tree = PrefixTree(self.pool)
        self.scheduler = Scheduler(self.rows, self.pool, self.tree)
        self._system: Node | None = None

    def submit(self, rid: str, tokens: list[int], max_new: int) -> None:
        self.scheduler.waiting.append(Req(rid, tokens, max_new))

    def pin_system_prompt(self, tokens: list[int]) -> bool:
        node, hit = self.tree.match(tokens)
        if len(hit) < len(tokens):
            return False
        if self._system is not None:
            self.tree.unlock(self._system)
        self.tree.lock(node)  # clean: near miss, the node pinned before is unlocked above
        self._system = node
        return True

    def cached_len(self, tokens: list[int]) -> int:
        node, hit = self.tree.match(tokens)
        self.tree.lock(node)  # leak: a match shorter than a page returns with its nodes still locked
        if len(hit) < 16:
            return 0
        n = len(hit)
        self.tree.unlock(node)
        return n

    def score(self, tokens: list[int]) -> float | None:
        slots = self.pool.alloc_aligned(len(tokens), 16)  # clean: near miss, all that is returned is freed
        if slots is None:
            return None
        row = self.rows.alloc()  # clean: near miss, freed with the slots; a missing row frees the slots
        if row is None:
            self.pool.free(slots)
            return None
        self.rows.table[row, : len(slots)] = self.rows.table.new_tensor(slots)
        value = float(self.model(self.rows.table[row, : len(slots)]).mean())
        self.rows.free(row)
        self.pool.free(slots)
        return value

    def draft(self, req: Req, k: int, accepted: int) -> int:
        extra = self.pool.alloc(k)  # leak: what was not accepted is not freed
        if extra is None:
            return 0
        keep = extra[:accepted]
        self.rows.table[req.row, len(req.slots) : len(req.slots) + len(keep)] = self.rows.table.new_tensor(keep)
        req.slots.extend(keep)
        return len(keep)

    def step(self) -> list[str]:
        self.scheduler.fill()
        self.scheduler.decode()
        done: list[str] = []
        for req in list(self.scheduler.running):
            req.new += 1
            if req.new >= req.max_new:
                self.scheduler.finish(req)
                done.append(req.rid)
        return done
