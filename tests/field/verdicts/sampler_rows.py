"""Persistent input batch: each running request occupies one row."""
from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import torch

INVALID: Final = -1


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True)
class Request:
    rid: str
    prompt: list[int]
    status: Status = Status.WAITING
    row: int = INVALID
    temperature: float = 1.0
    mirror: int = INVALID


class RowAllocator:
    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._taken: set[int] = set()

    def assign_row(self) -> int:
        for r in range(self._rows):
            if r not in self._taken:
                self._taken.add(r)
                return r
        return INVALID

    def unassign_row(self, row: int) -> None:
        self._taken.discard(row)

    def compact(self, order: list[int]) -> dict[int, int]:
        mapping = {old: new for new, old in enumerate(order)}
        self._taken = {mapping[r] for r in self._taken}
        return mapping


class InputBatch:
    def __init__(self, alloc: RowAllocator, rows: int, max_len: int) -> None:
        self.alloc = alloc
        self.tokens = torch.zeros(rows, max_len, dtype=torch.long)
        self.temps = torch.ones(rows)
        self.reqs: dict[str, Request] = {}

    def add(self, req: Request) -> bool:
        if req.row != INVALID:
            return True
        req.row = self.alloc.assign_row()  # clean: near miss, assigned only when the request has none, transition unassigns it
        if req.row == INVALID:
            return False
        self.tokens[req.row, : len(req.prompt)] = torch.tensor(req.prompt)
        self.temps[req.row] = req.temperature
        self.reqs[req.rid] = req
        return True

    def add_mirror(self, req: Request) -> bool:
        req.mirror = self.alloc.assign_row()  # leak: a preempted request keeps its mirror row for ever
        if req.mirror == INVALID:
            return False
        self.tokens[req.mirror].copy_(self.tokens[req.row])
        return True

    def transition(self, req: Request, status: Status) -> None:
        req.status = status
        match status:
            case Status.FINISHED:
                self.alloc.unassign_row(req.row)
                self.reqs.pop(req.rid, None)
                if req.mirror != INVALID:
                    self.alloc.unassign_row(req.mirror)
                    req.mirror = INVALID
                req.row = INVALID
            case Status.PREEMPTED:
                self.alloc.unassign_row(req.row)
                self.reqs.pop(req.rid, None)
                req.row = INVALID
                req.mirror = INVALID
            case Status.WAITING | Status.RUNNING:
                pass

    def dummy_run(self, model, n: int) -> torch.Tensor | None:
        rows: list[int] = []
        for _ in range(n):
            row = self.alloc.assign_row()  # clean: near miss, break on INVALID, the taken rows are unassigned after the run
            if row == INVALID:
                break
            rows.append(row)
        out = model(self.tokens[rows]) if rows else None
        for row in rows:
            self.alloc.unassign_row(row)
        return out

    def profile(self, model, lengths: list[int]) -> float:
        worst = 0.0
        for n in lengths:
            row = self.alloc.assign_row()  # leak: the match arm for too long inputs goes on without unassigning
            if row == INVALID:
                return worst
            match n:
                case 0:
                    self.alloc.unassign_row(row)
                case _ if n > self.tokens.shape[1]:
                    continue
                case _:
                    worst = max(worst, float(model(self.tokens[row, :n]).abs().max()))
                    self.alloc.unassign_row(row)
        return worst

    def swap_rows(self, a: Request, b: Request) -> bool:
        tmp = self.alloc.assign_row()  # clean: unassigned when the swap is done
        if tmp == INVALID:
            return False
        self.tokens[tmp] = self.tokens[a.row]
        self.tokens[a.row] = self.tokens[b.row]
        self.tokens[b.row] = self.tokens[tmp]
        a.row, b.row = b.row, a.row
        self.alloc.unassign_row(tmp)
        return True

    def sample_greedy(self, logits: torch.Tensor, ban: set[int] | None) -> torch.Tensor:
        scratch = self.alloc.assign_row()  # leak: without a ban list the argmax is returned at once
        if ban is None:
            return logits.argmax(-1)
        if scratch != INVALID:
            self.tokens[scratch, : len(ban)] = torch.tensor(sorted(ban))
            logits[:, self.tokens[scratch, : len(ban)]] = float("-inf")
            self.alloc.unassign_row(scratch)
        return logits.argmax(-1)

    def has_room(self) -> bool:
        row = self.alloc.assign_row()  # clean: near miss, INVALID is not a row, a real one goes straight back
        if row == INVALID:
            return False
        self.alloc.unassign_row(row)
        return True

    def rows_left(self) -> int:
        n = 0
        while self.alloc.assign_row() != INVALID:  # leak: counting by taking every row, none is unassigned
            n += 1
        return n
