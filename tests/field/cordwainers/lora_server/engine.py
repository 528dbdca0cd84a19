"""Requests and the running batch."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from .slots import AdapterTable, Resident


@dataclass
class LoraRequest:
    rid: int
    adapter: str | None
    tokens: list[int]
    max_new: int = 64
    res: Resident | None = None
    out: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.out) >= self.max_new


class Engine:
    def __init__(self, table: AdapterTable, width: int) -> None:
        self.table = table
        self.width = width
        self.batch: dict[int, LoraRequest] = {}
        self.parked: deque[LoraRequest] = deque()
        self.default: Resident | None = None

    def set_default(self, name: str) -> None:
        fresh = self.table.ref(name)  # clean: becomes the default, the one before it is unreferenced
        if self.default is not None:
            self.table.unref(self.default)
        self.default = fresh

    def start(self, req: LoraRequest) -> bool:
        if len(self.batch) >= self.width:
            return False
        if req.adapter is not None:
            req.res = self.table.ref(req.adapter)  # clean: near miss, retire undoes it under a guard
            if req.res is None:
                return False
        self.batch[req.rid] = req
        return True

    def start_many(self, reqs: list[LoraRequest]) -> int:
        started = 0
        for req in reqs:
            res = self.table.ref(req.adapter or "base")  # leak: the full batch parks the request, not the ref
            if res is None:
                continue
            if len(self.batch) >= self.width:
                self.parked.append(req)
                continue
            req.res = res
            self.batch[req.rid] = req
            started += 1
        return started

    def retire(self, rid: int) -> list[int]:
        req = self.batch.pop(rid)
        if req.res is not None:
            self.table.unref(req.res)
            req.res = None
        return req.out

    def sweep(self) -> dict[int, list[int]]:
        return {rid: self.retire(rid) for rid in [r for r, q in self.batch.items() if q.done]}

    def deltas(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i, req in enumerate(self.batch.values()):
            if req.res is None:
                continue
            w = self.table.bank.weights[req.res.slot, : req.res.rank]
            out[i] = (x[i] @ w.t()) @ w
        return out

    def blend(self, names: list[str], weights: list[float]) -> torch.Tensor | None:
        held: list[Resident] = []
        try:
            for name in names:
                res = self.table.ref(name)  # clean: near miss, return None goes through finally
                if res is None:
                    return None
                held.append(res)
            bank = self.table.bank.weights
            return sum(w * bank[r.slot] for r, w in zip(held, weights))
        finally:
            for res in held:
                self.table.unref(res)

    def norms(self, names: list[str]) -> dict[str, float]:
        out: dict[str, float] = {}
        for name in names:
            res = self.table.ref(name)  # leak: adapters of rank zero continue with their reference
            if res is None:
                continue
            if res.rank == 0:
                out[name] = 0.0
                continue
            out[name] = float(self.table.bank.weights[res.slot, : res.rank].norm())
            self.table.unref(res)
        return out

    def close(self) -> None:
        for rid in list(self.batch):
            self.retire(rid)
        if self.default is not None:
            self.table.unref(self.default)
            self.default = None
