"""Scratch workspaces for attention and MoE kernels."""
from __future__ import annotations

from collections import defaultdict
from typing import Optional

import torch


class WorkspaceArena:
    """Flat byte buffers on shelves by power-of-two size, under a byte cap."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.resident = 0
        self._shelves: dict[int, list[torch.Tensor]] = defaultdict(list)

    def lend(self, nbytes: int, device: torch.device) -> torch.Tensor:
        size = 1 << max(nbytes - 1, 1).bit_length()
        shelf = self._shelves[size]
        while shelf:
            buf = shelf.pop()  # leak: a buffer of another device is popped and skipped
            if buf.device == device:
                return buf
        if self.resident + size > self.cap_bytes:
            raise MemoryError(size)
        self.resident += size
        return torch.empty(size, dtype=torch.uint8, device=device)

    def lend_exact(self, size: int, device: torch.device) -> Optional[torch.Tensor]:
        shelf = self._shelves[size]
        for _ in range(len(shelf)):
            buf = shelf.pop(0)  # clean: near miss, a mismatch goes to the end of the shelf
            if buf.device == device:
                return buf
            shelf.append(buf)
        return None

    def restore(self, buf: torch.Tensor) -> None:
        base = buf if buf._base is None else buf._base
        self._shelves[base.numel()].append(base)


def permute_tokens(arena: WorkspaceArena, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Permuted copy of x inside a lent workspace; caller restores it."""
    ws = arena.lend(x.numel() * x.element_size(), x.device)  # clean: a view of it is handed to the caller
    out = ws[: x.numel() * x.element_size()].view(x.dtype).view_as(x)
    torch.index_select(x, 0, order, out=out)
    return out


def moe_forward(arena: WorkspaceArena, x: torch.Tensor, order: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    grouped = permute_tokens(arena, x, order)  # clean: restored after the matmul
    y = grouped @ w
    arena.restore(grouped)
    return y


def moe_debug_inputs(arena: WorkspaceArena, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return permute_tokens(arena, x, order).clone()  # leak: the clone is returned, the workspace is dropped


def moe_two_stage(arena: WorkspaceArena, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    h = permute_tokens(arena, x, order)  # leak: rebinding h loses the first workspace
    h = permute_tokens(arena, h, back)  # clean: restored before return
    y = h.clone()
    arena.restore(h)
    return y


def split_k_decode(arena: WorkspaceArena, q: torch.Tensor, splits: int) -> torch.Tensor:
    partial = None
    if splits > 1:
        partial = arena.lend(q.numel() * 4 * splits, q.device)  # clean: near miss, same condition guards the restore
    out = q.float().softmax(-1)
    if splits > 1:
        arena.restore(partial)
    return out


def split_k_prefill(arena: WorkspaceArena, q: torch.Tensor, splits: int, num_blocks: int) -> torch.Tensor:
    partial = None
    if splits > 1:
        partial = arena.lend(q.numel() * 4 * splits, q.device)  # leak: splits is lowered before the restoring test
    splits = min(splits, num_blocks)
    out = q.float().softmax(-1)
    if splits > 1:
        arena.restore(partial)
    return out


class SamplerScratch:
    """Workspace that grows with the batch."""

    def __init__(self, arena: WorkspaceArena, device: torch.device) -> None:
        self.arena = arena
        self.device = device
        self._logits: Optional[torch.Tensor] = None
        self._sort: Optional[torch.Tensor] = None

    def logits(self, nbytes: int) -> torch.Tensor:
        if self._logits is None or self._logits.numel() < nbytes:
            self._logits = self.arena.lend(nbytes, self.device)  # leak: growing overwrites the smaller workspace
        return self._logits

    def sort(self, nbytes: int) -> torch.Tensor:
        if self._sort is not None and self._sort.numel() < nbytes:
            self.arena.restore(self._sort)
            self._sort = None
        if self._sort is None:
            self._sort = self.arena.lend(nbytes, self.device)  # clean: near miss, smaller one restored first, close restores this
        return self._sort

    def close(self) -> None:
        for buf in (self._logits, self._sort):
            if buf is not None:
                self.arena.restore(buf)
        self._logits = self._sort = None


def top_p(arena: WorkspaceArena, probs: torch.Tensor, p: float) -> torch.Tensor:
    ws = arena.lend(probs.numel() * 8, probs.device)  # clean: near miss, early return sits inside try with finally
    try:
        if p >= 1.0:
            return probs
        vals, _ = probs.sort(-1, descending=True)
        return torch.where(vals.cumsum(-1) <= p, vals, 0.0)
    finally:
        arena.restore(ws)


def expert_sums(arena: WorkspaceArena, xs: list[torch.Tensor], order: torch.Tensor) -> list[torch.Tensor]:
    sums, lent = [], []
    for x in xs:
        grouped = permute_tokens(arena, x, order)  # clean: near miss, collected in lent and restored after the loop
        lent.append(grouped)
        sums.append(grouped.sum(0))
    for grouped in lent:
        arena.restore(grouped)
    return sums


def first_finite(arena: WorkspaceArena, xs: list[torch.Tensor], order: torch.Tensor) -> Optional[float]:
    for x in xs:
        grouped = permute_tokens(arena, x, order)  # leak: the finite one returns its norm unrestored
        norm = float(grouped.norm())
        if norm < float("inf"):
            return norm
        arena.restore(grouped)
    return None


def exact_or_new(arena: WorkspaceArena, nbytes: int, device: torch.device) -> torch.Tensor:
    found = arena.lend_exact(nbytes, device)  # clean: handed to the caller
    if found is None:
        found = arena.lend(nbytes, device)  # clean: near miss, rebinds None only
    return found
