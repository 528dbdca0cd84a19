"""Expert layer: dispatch, expert compute, combine."""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Callable, Sequence

import torch

from .capacity import OverflowPool
from .router import Router


class ExpertLayer:
    def __init__(self, pool: OverflowPool, router: Router, experts: Sequence[Callable]):
        self.pool = pool
        self.router = router
        self.experts = list(experts)
        self._batch = 0

    def forward(self, tokens: torch.Tensor, choice: Sequence[int]) -> torch.Tensor:
        self._batch += 1
        batch = self._batch
        for expert in range(len(self.experts)):
            ids = [i for i, c in enumerate(choice) if c == expert]
            if ids:
                self.router.assign(batch, expert, ids, 1.0)
        out = torch.zeros_like(tokens)
        for route in self.router.routes(batch):
            rows = self.pool.primary.rows_of(route.seat)
            rows.copy_(tokens[list(route.token_ids)])
            out[list(route.token_ids)] = self.experts[route.seat.expert](rows) * route.weight
        self.router.finish(batch)
        return out

    @contextmanager
    def seated(self, expert: int, tokens: torch.Tensor):
        seat = self.pool.rent(expert, tokens.shape[0])  # clean: goes back after the with block
        if seat is None:
            yield None
            return
        try:
            rows = self.pool.primary.rows_of(seat)
            rows.copy_(tokens)
            yield rows
        finally:
            self.pool.unrent(seat)

    def run_shared(self, tokens: torch.Tensor) -> torch.Tensor:
        with self.seated(0, tokens) as rows:  # clean: with block
            if rows is None:
                return self.experts[0](tokens)
            return self.experts[0](rows).clone()

    def run_ensemble(self, tokens: torch.Tensor) -> torch.Tensor:
        with ExitStack() as stack:
            outs = []
            for i, expert in enumerate(self.experts):
                rows = stack.enter_context(self.seated(i, tokens))  # clean: closed by the exit stack
                outs.append(expert(tokens if rows is None else rows))
            return torch.stack(outs).mean(0)

    def swap_experts(self, a: int, b: int, rows: int) -> bool:
        left = self.pool.rent(a, rows)  # leak: when the right seat is refused the left one stays rented
        right = self.pool.rent(b, rows)  # leak: when the left seat is refused the right one stays rented
        if left is None or right is None:
            return False
        self.experts[a], self.experts[b] = self.experts[b], self.experts[a]
        self.pool.primary.rows_of(left).zero_()
        self.pool.primary.rows_of(right).zero_()
        self.pool.unrent(left)
        self.pool.unrent(right)
        return True

    def balanced(self, tokens: torch.Tensor) -> torch.Tensor:
        seat = self.pool.rent_balanced(range(len(self.experts)), tokens.shape[0])  # clean: goes back below
        if seat is None:
            return tokens
        rows = self.pool.primary.rows_of(seat)
        rows.copy_(tokens)
        out = self.experts[seat.expert](rows).clone()
        self.pool.unrent(seat)
        return out
