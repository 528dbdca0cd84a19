"""Fused attention layers sharing a linked list of workspaces."""
from __future__ import annotations

import time
from typing import Optional, Tuple

import torch
import torch.nn as nn


class Workspace:
    __slots__ = ("mem", "next", "owner")

    def __init__(self, nbytes: int, device) -> None:
        self.mem = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.next: Optional[Workspace] = None
        self.owner: Optional[str] = None

    def as_tensor(self, shape, dtype: torch.dtype) -> torch.Tensor:
        numel = 1
        for s in shape:
            numel *= s
        return self.mem[: numel * dtype.itemsize].view(dtype).view(shape)


class WorkspaceList:
    """Singly linked stack of free workspaces."""

    def __init__(self, count: int, nbytes: int, device) -> None:
        self.nbytes = nbytes
        self._head: Optional[Workspace] = None
        for _ in range(count):
            ws = Workspace(nbytes, device)
            ws.next, self._head = self._head, ws

    def grab(self, owner: str) -> Optional[Workspace]:
        ws = self._head
        if ws is None:
            return None
        self._head = ws.next
        ws.next = None
        ws.owner = owner
        return ws

    def drop(self, ws: Workspace) -> None:
        ws.owner = None
        ws.next = self._head
        self._head = ws


class WorkspaceScope:
    """Grabs on enter; does not give back a workspace it was handed."""

    def __init__(self, pool: WorkspaceList, name: str, ws: Optional[Workspace] = None) -> None:
        self.pool = pool
        self.name = name
        self.ws = ws
        self._owned = ws is None

    def __enter__(self) -> Workspace:
        if self._owned:
            self.ws = self.pool.grab(self.name)  # clean: near miss, _owned tells __exit__ to drop it
            if self.ws is None:
                raise MemoryError(self.name)
        return self.ws

    def __exit__(self, *exc) -> None:
        if self._owned and self.ws is not None:
            self.pool.drop(self.ws)
            self.ws = None


class ProfiledScope:
    """Reports how long the workspace was out."""

    def __init__(self, pool: WorkspaceList, name: str, enabled: bool = False) -> None:
        self.pool = pool
        self.name = name
        self.enabled = enabled
        self.ws: Optional[Workspace] = None
        self._t0 = 0.0

    def __enter__(self) -> Workspace:
        self.ws = self.pool.grab(self.name)  # leak: __exit__ returns before drop when profiling is off
        if self.ws is None:
            raise MemoryError(self.name)
        self._t0 = time.perf_counter()
        return self.ws

    def __exit__(self, *exc) -> None:
        if not self.enabled:
            return
        print(f"{self.name}: {time.perf_counter() - self._t0:.6f}s")
        self.pool.drop(self.ws)
        self.ws = None


class FusedQKV(nn.Module):
    def __init__(self, dim: int, heads: int, pool: WorkspaceList) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, 3 * dim, bias=False)
        self.heads = heads
        self.pool = pool

    def forward(self, x: torch.Tensor, ws: Optional[Workspace] = None) -> Tuple[torch.Tensor, ...]:
        own = ws is None
        if own:
            ws = self.pool.grab("qkv")  # clean: near miss, dropped when own
            if ws is None:
                return self.proj(x).chunk(3, dim=-1)
        out = ws.as_tensor((*x.shape[:-1], self.proj.out_features), x.dtype)
        torch.matmul(x, self.proj.weight.t(), out=out)
        parts = tuple(p.contiguous() for p in out.chunk(3, dim=-1))
        if own:
            self.pool.drop(ws)
        return parts


class FusedAttention(nn.Module):
    def __init__(self, dim: int, heads: int, pool: WorkspaceList) -> None:
        super().__init__()
        self.qkv = FusedQKV(dim, heads, pool)
        self.out = nn.Linear(dim, dim)
        self.pool = pool
        self._scratch: Optional[Workspace] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with WorkspaceScope(self.pool, "attn") as ws:  # clean: scope drops on exit
            q, k, v = self.qkv(x, ws)
            s = torch.softmax(q @ k.transpose(-2, -1), dim=-1)
            return self.out(s @ v)

    def begin_decode(self, keep: bool) -> None:
        self._scratch = self.pool.grab("decode")  # leak: a second begin_decode overwrites the held workspace
        if self._scratch is not None and not keep:
            self._scratch.mem.zero_()

    def end_decode(self) -> None:
        if self._scratch is not None:
            self.pool.drop(self._scratch)
            self._scratch = None

    def decode_step(self, x: torch.Tensor) -> torch.Tensor:
        ws = self._scratch or self.pool.grab("step")  # clean: near miss, dropped unless it is the field's
        if ws is None:
            raise MemoryError("step")
        q, k, v = self.qkv(x, ws)
        y = self.out(v * (q * k).sum(-1, keepdim=True).sigmoid())
        if ws is not self._scratch:
            self.pool.drop(ws)
        return y

    def autotune(self, x: torch.Tensor, tiles: list[int]) -> Optional[int]:
        best, best_ms = None, float("inf")
        for tile in tiles:
            ws = self.pool.grab("tune")  # leak: tiles that do not divide the length are skipped with the workspace
            if ws is None:
                break
            if x.shape[1] % tile:
                continue
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for chunk in x.split(tile, dim=1):
                self.qkv(chunk, ws)
            end.record()
            end.synchronize()
            if start.elapsed_time(end) < best_ms:
                best, best_ms = tile, start.elapsed_time(end)
            self.pool.drop(ws)
        return best


def backward_pair(pool: WorkspaceList, q: torch.Tensor, k: torch.Tensor) -> Optional[torch.Tensor]:
    dq = pool.grab("dq")  # clean: near miss, given back also when dk is missing
    if dq is None:
        return None
    dk = pool.grab("dk")  # clean: dropped at the end
    if dk is None:
        pool.drop(dq)
        return None
    a = dq.as_tensor(q.shape, q.dtype).copy_(q)
    b = dk.as_tensor(k.shape, k.dtype).copy_(k)
    grad = a @ b.transpose(-2, -1)
    pool.drop(dk)
    pool.drop(dq)
    return grad


def log_attention(pool: WorkspaceList, attn: FusedAttention, x: torch.Tensor) -> None:
    with WorkspaceScope(pool, "log") as ws:  # clean: scope drops on exit
        norms = ws.as_tensor(x.shape, x.dtype).copy_(x).norm(dim=-1)
        print(norms.mean().item())
    last = pool.grab("last")  # leak: only its size is read
    if last is not None:
        print(last.mem.numel(), attn.training)
