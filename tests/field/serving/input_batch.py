"""Persistent batch of the model runner: each request owns a row of the input tensors."""
import typing as tp
from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class CachedRequest:
    req_id: str
    tokens: tp.List[int]
    temperature: float = 1.0
    row: int = -1


class RowTable(object):
    def __init__(self, max_reqs: int) -> None:
        self.used = np.zeros(max_reqs, dtype=bool)

    def claim(self) -> int:
        free = np.flatnonzero(~self.used)
        if free.size == 0:
            return -1
        self.used[free[0]] = True
        return int(free[0])

    def unclaim(self, row: int) -> None:
        self.used[row] = False


class InputBatch:
    def __init__(self, max_reqs: int, max_len: int, strict: bool = False) -> None:
        self.rows = RowTable(max_reqs)
        self.token_ids = torch.zeros(max_reqs, max_len, dtype=torch.long)
        self.temps = torch.ones(max_reqs)
        self.reqs: tp.Dict[str, CachedRequest] = {}
        self.max_len = max_len
        self.strict = strict

    def add(self, req: CachedRequest) -> bool:
        if req.req_id in self.reqs or len(req.tokens) > self.max_len:
            return False
        row = self.rows.claim()  # clean: moved into the request, which remove takes apart
        if row == -1:
            return False
        req.row = row
        self.token_ids[row, : len(req.tokens)] = torch.tensor(req.tokens)
        self.temps[row] = req.temperature
        self.reqs[req.req_id] = req
        return True

    def add_late_check(self, req: CachedRequest) -> bool:
        row = self.rows.claim()  # leak: a prompt that is too long returns with the row claimed
        if row < 0:
            return False
        if len(req.tokens) > self.max_len:
            return False
        self.remove(req.req_id)
        req.row = row
        self.reqs[req.req_id] = req
        return True

    def add_strict(self, req: CachedRequest) -> None:
        row = self.rows.claim()  # leak: the raise in strict mode comes before the row has an owner
        if row < 0:
            raise IndexError("batch is full")
        if req.req_id in self.reqs:
            if self.strict:
                raise KeyError(req.req_id)
            self.rows.unclaim(self.reqs[req.req_id].row)
        req.row = row
        self.reqs[req.req_id] = req

    def remove(self, req_id: str) -> tp.Optional[CachedRequest]:
        req = self.reqs.pop(req_id, None)
        if req is not None:
            self.rows.unclaim(req.row)
            req.row = -1
        return req

    def condense(self) -> tp.List[tp.Tuple[int, int]]:
        """Move the highest rows into holes."""
        moves: tp.List[tp.Tuple[int, int]] = []
        for req in sorted(self.reqs.values(), key=lambda r: -r.row):
            hole = self.rows.claim()  # clean: near miss, unclaimed before the break, else swapped with the old row
            if hole < 0:
                break
            if hole > req.row:
                self.rows.unclaim(hole)
                break
            self.token_ids[hole] = self.token_ids[req.row]
            self.rows.unclaim(req.row)
            moves.append((req.row, hole))
            req.row = hole
        return moves

    def condense_old(self) -> int:
        n = 0
        for req in list(self.reqs.values()):
            hole = self.rows.claim()  # leak: when the hole lies behind the row it is skipped and stays claimed
            if hole < 0:
                return n
            if hole > req.row:
                continue
            old, req.row = req.row, hole
            self.token_ids[hole] = self.token_ids[old]
            self.rows.unclaim(old)
            n += 1
        return n

    def dummy_run(self, n: int) -> torch.Tensor:
        rows = []
        for _ in range(n):
            r = self.rows.claim()  # clean: all rows in the list are unclaimed
            if r < 0:
                break
            rows.append(r)
        out = self.token_ids[rows].float().sum(dim=-1) if rows else torch.zeros(0)
        while rows:
            self.rows.unclaim(rows.pop())
        return out

    def dummy_run_half(self, n: int) -> torch.Tensor:
        rows = [self.rows.claim() for _ in range(n)]  # leak: zip stops at the shorter list and leaves the other rows claimed
        half = [i for i in range(n // 2)]
        out = self.token_ids[rows].float().sum(dim=-1)
        for _, r in zip(half, rows):
            self.rows.unclaim(r)
        return out

    def replace(self, req_id: str, tokens: tp.List[int]) -> bool:
        req = self.reqs.get(req_id)
        if req is None:
            return False
        row = self.rows.claim()  # clean: near miss, the old row is unclaimed in the same step
        if row < 0:
            return False
        req.row, old = row, req.row
        self.rows.unclaim(old)
        self.token_ids[row, : len(tokens)] = torch.tensor(tokens)
        return True
