"""Expert dispatch with pooled send and receive windows."""
from __future__ import annotations

import contextlib
from typing import Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn


class WindowArena:
    """One big tensor carved in equal windows; a bitmap in an int tells which are out."""

    def __init__(self, windows: int, tokens: int, hidden: int) -> None:
        self.base = torch.empty(windows, tokens, hidden)
        self._mask = (1 << windows) - 1
        self.windows = windows

    def lease(self) -> int:
        for i in range(self.windows):
            if self._mask >> i & 1:
                self._mask &= ~(1 << i)
                return i
        raise RuntimeError("arena exhausted")

    def unlease(self, i: int) -> None:
        self._mask |= 1 << i

    def view(self, i: int) -> torch.Tensor:
        return self.base[i]

    @contextlib.contextmanager
    def window(self) -> Iterator[torch.Tensor]:
        i = self.lease()  # clean: finally
        try:
            yield self.view(i)
        finally:
            self.unlease(i)


class ExpertDispatch(nn.Module):
    def __init__(self, experts: nn.ModuleList, arena: WindowArena, top_k: int, world: int = 1) -> None:
        super().__init__()
        self.experts = experts
        self.arena = arena
        self.top_k = top_k
        self.world = world
        self.gate = nn.Linear(arena.base.shape[-1], len(experts), bias=False)

    def route(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        w, idx = self.gate(x).softmax(-1).topk(self.top_k)
        return w / w.sum(-1, keepdim=True), idx

    def _permute(self, x: torch.Tensor, idx: torch.Tensor) -> Tuple[int, torch.Tensor]:
        order = idx.flatten().argsort()
        win = self.arena.lease()  # clean: the window number is returned
        self.arena.view(win)[: len(order)].copy_(x[order // self.top_k])
        return win, order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, idx = self.route(x)
        win, order = self._permute(x, idx)  # clean: unleased before the combination
        rows = self.arena.view(win)[: len(order)]
        counts = torch.bincount(idx.flatten(), minlength=len(self.experts)).tolist()
        outs = [e(c) for e, c in zip(self.experts, rows.split(counts)) if len(c)]
        y = torch.cat(outs)
        self.arena.unlease(win)
        out = torch.zeros_like(x)
        out.index_add_(0, order // self.top_k, y * w.flatten()[order, None])
        return out

    def forward_single(self, x: torch.Tensor) -> torch.Tensor:
        w, idx = self.route(x)
        win, order = self._permute(x, idx)  # leak: if one expert takes all tokens the result returns directly
        first = int(idx.flatten()[order[0]])
        if bool((idx == first).all()):
            return self.experts[first](x)
        rows = self.arena.view(win)[: len(order)].clone()
        self.arena.unlease(win)
        return rows.mean(dim=0, keepdim=True) * w.mean()

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        send = self.arena.lease()  # clean: unleased after the exchange
        recv = self.arena.lease()  # leak: only the send window goes back
        self.arena.view(send)[: x.shape[0]].copy_(x)
        dist.all_to_all_single(self.arena.view(recv), self.arena.view(send))
        out = self.arena.view(recv)[: x.shape[0]].clone()
        self.arena.unlease(send)
        return out

    def all_to_all_paired(self, x: torch.Tensor) -> torch.Tensor:
        with self.arena.window() as send, self.arena.window() as recv:  # clean: with closes both windows
            send[: x.shape[0]].copy_(x)
            dist.all_to_all_single(recv, send)
            return recv[: x.shape[0]].clone()

    def load(self, x: torch.Tensor) -> List[int]:
        _, idx = self.route(x)
        win, _ = self._permute(x, idx)  # clean: unleased at once
        self.arena.unlease(win)
        return torch.bincount(idx.flatten(), minlength=len(self.experts)).tolist()

    def order_only(self, x: torch.Tensor) -> torch.Tensor:
        _, idx = self.route(x)
        _, order = self._permute(x, idx)  # leak: the window number is thrown away
        return order

    def capacity_drop(self, x: torch.Tensor, cap: int) -> Optional[torch.Tensor]:
        wins: List[int] = []
        kept = []
        for e in range(len(self.experts)):
            win = self.arena.lease()  # leak: the overflow return skips the release loop below
            wins.append(win)
            rows = x[self.route(x)[1][:, 0] == e]
            if len(rows) > cap:
                return None
            self.arena.view(win)[: len(rows)].copy_(rows)
            kept.append(self.arena.view(win)[: len(rows)].sum(0))
        for win in wins:
            self.arena.unlease(win)
        return torch.stack(kept)
