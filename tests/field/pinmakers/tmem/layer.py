"""A transformer block that keeps some cells from one call to the next."""
from __future__ import annotations

from typing import Optional

import torch
import torch.nn as nn

from . import ops
from .cells import Cell, CellStore


class FusedBlock(nn.Module):
    def __init__(self, dim: int, store: CellStore, use_residual_cell: bool):
        super().__init__()
        self.store = store
        self.use_residual_cell = use_residual_cell
        self.qkv = nn.Linear(dim, 3 * dim)
        self.residual: Optional[Cell] = None

    def _enter_residual(self, x: torch.Tensor) -> None:
        if self.use_residual_cell:
            self.residual = self.store.cell_like(x)  # clean: near miss, _leave_residual() tests the same flag

    def _leave_residual(self, y: torch.Tensor) -> torch.Tensor:
        if not self.use_residual_cell:
            return y
        y = y + self.residual.as_tensor(*y.shape)
        self.residual.unhold()
        self.residual = None
        return y

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._enter_residual(x)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self._leave_residual(ops.attend(self.store, q, k, v))

    @torch.no_grad()
    def forward_gated(self, x: torch.Tensor, gate: float) -> torch.Tensor:
        c = self.store.cell_like(x)  # leak: a zero gate returns x without letting it go
        if gate == 0.0:
            return x
        y = self.qkv(x)[..., : x.shape[-1]] * gate + c.as_tensor(*x.shape)
        c.unhold()
        return y
