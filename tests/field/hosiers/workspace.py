"""Attention workspaces: pooled tensors for metadata, split-KV partials and dequantisation."""
from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Optional

import torch

_POOLS: dict[str, "WorkspacePool"] = {}


class WorkspacePool:
    """Power-of-two buckets of byte tensors on one device."""

    def __init__(self, device: str, min_bytes: int = 1 << 12) -> None:
        self.device = device
        self.min_bytes = min_bytes
        self._cached: dict[int, list[torch.Tensor]] = {}
        self._live: set[int] = set()

    def _round(self, nbytes: int) -> int:
        size = self.min_bytes
        while size < nbytes:
            size <<= 1
        return size

    def rent(self, nbytes: int) -> torch.Tensor:
        size = self._round(nbytes)
        lst = self._cached.setdefault(size, [])
        t = lst.pop() if lst else torch.empty(size, dtype=torch.uint8, device=self.device)
        self._live.add(t.data_ptr())
        return t

    def restore(self, t: torch.Tensor) -> None:
        self._live.discard(t.data_ptr())
        self._cached[t.numel()].append(t)


def pool_for(device: str) -> WorkspacePool:
    if device not in _POOLS:
        _POOLS[device] = WorkspacePool(device)
    return _POOLS[device]


def rent_f32(pool: WorkspacePool, n: int) -> torch.Tensor:
    raw = pool.rent(n * 4)  # clean: handed on to the caller
    raw[:n * 4].zero_()
    return raw


@dataclass
class Plan:
    cu_seqlens: torch.Tensor
    partial: Optional[torch.Tensor]
    splits: int
    owner: WorkspacePool

    def end(self) -> None:
        self.owner.restore(self.cu_seqlens)
        if self.splits > 1:
            self.owner.restore(self.partial)


class Planner:
    def __init__(self, device: str, heads: int, head_dim: int) -> None:
        self.pool = pool_for(device)
        self.heads = heads
        self.head_dim = head_dim
        self._sizes: list[int] = []
        self._warm: dict[int, torch.Tensor] = {}

    def choose_splits(self, seqlens: list[int]) -> int:
        return 1 if max(seqlens, default=0) < 4096 else 4

    def plan(self, seqlens: list[int]) -> Plan:
        cu = self.pool.rent(4 * (len(seqlens) + 1))  # clean: in the plan, whose end restores it
        splits = self.choose_splits(seqlens)
        partial = None
        if splits > 1:
            partial = rent_f32(self.pool, splits * self.heads * self.head_dim)  # clean: near miss, see end
        return Plan(cu, partial, splits, self.pool)

    def run(self, q: torch.Tensor, seqlens: list[int], kernel) -> torch.Tensor:
        plan = self.plan(seqlens)  # clean: ended after the kernel
        out = torch.empty_like(q)
        kernel(q, plan.cu_seqlens, plan.partial, out)
        plan.end()
        return out

    def run_empty_ok(self, q: torch.Tensor, seqlens: list[int], kernel) -> torch.Tensor:
        plan = self.plan(seqlens)  # leak: an empty query returns before the plan ends
        out = torch.empty_like(q)
        if q.shape[0] == 0:
            return out
        kernel(q, plan.cu_seqlens, plan.partial, out)
        plan.end()
        return out

    def tune_fast(self, kernel, q: torch.Tensor, clock, limit: float) -> int:
        out = torch.empty_like(q)
        for splits in (1, 2, 4, 8):
            scratch = rent_f32(self.pool, splits * self.heads * self.head_dim)  # leak: returned early
            begin = clock()
            kernel(q, None, scratch, out)
            if clock() - begin < limit:
                return splits
            self.pool.restore(scratch)
        return 8

    # ---- warm buffers --------------------------------------------------------

    def warm(self, sizes: list[int]) -> None:
        for n in sorted(set(sizes)):
            if n not in self._warm:
                self._warm[n] = self.pool.rent(n)  # clean: near miss, cool restores all of them
                bisect.insort(self._sizes, n)

    def cool(self) -> None:
        for t in self._warm.values():
            self.pool.restore(t)
        self._warm.clear()
        self._sizes.clear()

    def pick(self, nbytes: int) -> tuple[torch.Tensor, bool]:
        """A warm buffer if one is large enough, otherwise a rented one (second is True)."""
        i = bisect.bisect_left(self._sizes, nbytes)
        if i < len(self._sizes):
            return self._warm[self._sizes[i]], False
        return self.pool.rent(nbytes), True  # clean: the flag tells the caller that it owns it

    def cast(self, x: torch.Tensor, kernel) -> torch.Tensor:
        buf, rented = self.pick(x.numel() * 2)  # clean: near miss, restored exactly when rented
        y = torch.empty_like(x)
        kernel(x, buf, y)
        if rented:
            self.pool.restore(buf)
        return y

    def cast_pair(self, x: torch.Tensor, y: torch.Tensor, kernel) -> None:
        bx, mine = self.pick(x.numel() * 2)  # leak: the second pick overwrites the flag of the first
        by, mine = self.pick(y.numel() * 2)  # clean: restored under its flag
        kernel(x, bx, y, by)
        if mine:
            self.pool.restore(by)


class Dequantizer:
    """Blockwise int4 weights, dequantised into a workspace for prefill."""

    def __init__(self, pool: WorkspacePool, group: int) -> None:
        self.pool = pool
        self.group = group
        self.held: Optional[torch.Tensor] = None

    def _expand(self, qweight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out = self.pool.rent(qweight.numel() * 4)  # clean: returned
        tmp = self.pool.rent(scales.numel() * 4)  # clean: restored before returning
        wide = tmp.view(torch.float32)[:scales.numel()]
        wide.copy_(scales.flatten())
        torch.mul(qweight.float().flatten(), wide.repeat_interleave(self.group), out=out.view(torch.float32))
        self.pool.restore(tmp)
        return out

    def matmul(self, x: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        w = self._expand(qweight, scales)  # leak: the view used in the product is all that is kept
        mat = w.view(torch.float16)[:qweight.numel()].view(qweight.shape)
        return x @ mat

    def matmul_restore(self, x: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        w = self._expand(qweight, scales)  # clean: near miss, the view dies and the base is restored
        mat = w.view(torch.float16)[:qweight.numel()].view(qweight.shape)
        y = x @ mat
        self.pool.restore(w)
        return y

    def hold(self, qweight: torch.Tensor, scales: torch.Tensor) -> None:
        self.unhold()
        self.held = self._expand(qweight, scales)  # clean: near miss, the previous one is unheld first

    def unhold(self) -> None:
        if self.held is not None:
            self.pool.restore(self.held)
            self.held = None


class StickyDequantizer(Dequantizer):
    def hold(self, qweight: torch.Tensor, scales: torch.Tensor) -> None:
        if self.held is None or self.held.numel() < qweight.numel() * 4:
            self.held = self._expand(qweight, scales)  # leak: a larger weight overwrites the held one


def gather_rows(device: str, table: torch.Tensor, ids: list[int]) -> torch.Tensor:
    pool = pool_for(device)
    idx = pool.rent(8 * len(ids))  # leak: only the multi-row way restores it
    view = idx[:8 * len(ids)].view(torch.int64)
    view.copy_(torch.tensor(ids))
    if len(ids) == 1:
        return table[view[0]].unsqueeze(0)
    rows = table.index_select(0, view)
    pool.restore(idx)
    return rows
