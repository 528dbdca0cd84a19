"""Operators over cells. Those that return a Cell give its hold to the caller."""
from __future__ import annotations

from typing import List, Optional

import torch

from .cells import Cell, CellStore
from .frames import frame


def score_cell(store: CellStore, q: torch.Tensor, k: torch.Tensor) -> Cell:
    c = store.cell(q.shape[0] * k.shape[0])  # clean: returned to the caller
    torch.matmul(q, k.T, out=c.as_tensor(q.shape[0], k.shape[0]))
    return c


def attend(store: CellStore, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with frame(store) as f:
        c = score_cell(store, q, k)  # clean: near miss, the frame adopts it
        f.adopt(c)
        s = c.as_tensor(q.shape[0], k.shape[0])
        return s.softmax(-1) @ v


def score_matrix(store: CellStore, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    c = score_cell(store, q, k)  # leak: its tensor is copied and the cell is not let go
    return c.as_tensor(q.shape[0], k.shape[0]).clone()


def running_max(store: CellStore, rows: List[torch.Tensor]) -> Optional[torch.Tensor]:
    best: Optional[Cell] = None
    for r in rows:
        c = store.cell_like(r)  # leak: a better row replaces best without letting the old cell go
        if best is None or float(c.data[: r.numel()].max()) > float(best.data[: r.numel()].max()):
            best = c
        else:
            c.unhold()
    if best is None:
        return None
    out = best.data[: rows[0].numel()].clone()
    best.unhold()
    return out


def running_sum(store: CellStore, rows: List[torch.Tensor]) -> Optional[torch.Tensor]:
    acc: Optional[Cell] = None
    for r in rows:
        nxt = store.cell_like(r)  # clean: near miss, acc is let go before it is rebound
        if acc is not None:
            nxt.data[: r.numel()] += acc.data[: r.numel()]
            acc.unhold()
        acc = nxt
    if acc is None:
        return None
    out = acc.data[: rows[0].numel()].clone()
    acc.unhold()
    return out
