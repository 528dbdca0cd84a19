"""Ring attention over a context-parallel group; receive buffers come from a shaped arena."""
from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class ArenaFull(RuntimeError):
    pass


class ShapedArena:
    """Tensors cached by (shape, dtype). Bytes on loan and on the shelves share one limit."""

    def __init__(self, device: torch.device, limit_bytes: int):
        self.device = device
        self.limit = limit_bytes
        self._bytes = 0
        self._cond = threading.Condition()
        self._shelves: Dict[tuple, List[torch.Tensor]] = defaultdict(list)
        self._loans: Dict[int, tuple] = {}

    def _take(self, key: tuple) -> Optional[torch.Tensor]:
        shape, dtype = key
        if self._shelves[key]:
            t = self._shelves[key].pop()  # clean: returned to the borrower
        else:
            need = math.prod(shape) * dtype.itemsize
            if self._bytes + need > self.limit:
                return None
            t = torch.empty(shape, dtype=dtype, device=self.device)
            self._bytes += need
        self._loans[t.data_ptr()] = key
        return t

    def borrow(self, shape, dtype) -> torch.Tensor:
        """Waits for room."""
        key = (tuple(shape), dtype)
        with self._cond:
            while True:
                t = self._take(key)  # clean: returned, None waits for a hand_back
                if t is not None:
                    return t
                self._cond.wait()

    def try_borrow(self, shape, dtype) -> Optional[torch.Tensor]:
        with self._cond:
            return self._take((tuple(shape), dtype))  # clean: returned to the borrower

    def hand_back(self, t: torch.Tensor) -> None:
        with self._cond:
            key = self._loans.pop(t.data_ptr())
            self._shelves[key].append(t)
            self._cond.notify_all()


@dataclass
class Inflight:
    k: torch.Tensor
    v: torch.Tensor
    reqs: list

    def wait(self) -> None:
        for r in self.reqs:
            r.wait()
        self.reqs.clear()

    def release(self, arena: ShapedArena) -> None:
        arena.hand_back(self.k)
        arena.hand_back(self.v)


def post_recv(arena: ShapedArena, k, v, peer_in: int, peer_out: int, group) -> Optional[Inflight]:
    rk = arena.try_borrow(k.shape, k.dtype)  # leak: kept when the borrow of rv gives None
    if rk is None:
        return None
    rv = arena.try_borrow(v.shape, v.dtype)  # clean: leaves in the Inflight
    if rv is None:
        return None
    ops = [
        dist.P2POp(dist.isend, k, peer_out, group),
        dist.P2POp(dist.isend, v, peer_out, group),
        dist.P2POp(dist.irecv, rk, peer_in, group),
        dist.P2POp(dist.irecv, rv, peer_in, group),
    ]
    return Inflight(rk, rv, dist.batch_isend_irecv(ops))


def accumulate(out, lse, q, k, v, scale: float) -> None:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).float() * scale
    blk = torch.logsumexp(scores, dim=-1)
    new = torch.logaddexp(lse, blk)
    w = torch.exp(lse - new).unsqueeze(-1)
    p = torch.exp(scores - new.unsqueeze(-1))
    out.mul_(w).add_(torch.einsum("bhqk,bhkd->bhqd", p, v.float()))
    lse.copy_(new)


def ring_forward(arena: ShapedArena, q, k, v, group, causal: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world, (rank + 1) % world
    scale = q.shape[-1] ** -0.5
    acc = arena.borrow(q.shape, torch.float32)  # clean: handed back on the error path and at the end
    lse = arena.borrow(q.shape[:-1], torch.float32)  # clean: returned for the backward, or handed back on error
    acc.zero_()
    lse.fill_(float("-inf"))
    held: Optional[Inflight] = None
    for hop in range(world):
        nxt = None
        if hop + 1 < world:
            nxt = post_recv(arena, k, v, left, right, group)  # clean: near miss, becomes held and is released a hop later
            if nxt is None:
                if held is not None:
                    held.release(arena)
                arena.hand_back(acc)
                arena.hand_back(lse)
                raise ArenaFull("no room for the next kv block")
        owner = (rank - hop) % world
        if not (causal and owner > rank):
            accumulate(acc, lse, q, k, v, scale)
        if nxt is not None:
            nxt.wait()
        if held is not None:
            held.release(arena)
        held = nxt
        if held is not None:
            k, v = held.k, held.v
    result = torch.empty_like(q)
    result.copy_(acc)
    arena.hand_back(acc)
    return result, lse


def row_delta(arena: ShapedArena, out, grad) -> torch.Tensor:
    d = arena.borrow(out.shape[:-1], torch.float32)  # clean: returned to the caller
    torch.sum(out.float() * grad.float(), dim=-1, out=d)
    return d


def ring_backward(arena: ShapedArena, q, kv_blocks, out, lse, grad, owners):
    delta = row_delta(arena, out, grad)  # clean: handed back after the loop
    dq = torch.zeros_like(q, dtype=torch.float32)
    dkv = None
    for (k, v), owner in zip(kv_blocks, owners):
        dkv = arena.borrow((2, *k.shape), torch.float32)  # leak: each turn rebinds dkv, only the last is handed back
        p = torch.exp(torch.einsum("bhqd,bhkd->bhqk", q, k).float() - lse.unsqueeze(-1))
        ds = p * (torch.einsum("bhqd,bhkd->bhqk", grad, v).float() - delta.unsqueeze(-1))
        dkv[0].copy_(torch.einsum("bhqk,bhqd->bhkd", ds, q.float()))
        dkv[1].copy_(torch.einsum("bhqk,bhqd->bhkd", p, grad.float()))
        dq.add_(torch.einsum("bhqk,bhkd->bhqd", ds, k.float()))
        dist.reduce(dkv, owner)
    if dkv is not None:
        arena.hand_back(dkv)
    arena.hand_back(delta)
    return dq


def log_stats(arena: ShapedArena, out, grad, writer, step: int) -> None:
    probe = torch.empty(out.shape[:-1], dtype=torch.float32, device=out.device)
    probe.copy_(row_delta(arena, out, grad))  # leak: copied into probe and dropped
    writer.add_scalar("attn/delta_max", probe.abs().max().item(), step)


class RotaryScratch:
    """Two alternating buffers for rotated q/k; flip() trades them."""

    def __init__(self, arena: ShapedArena, shape, dtype):
        self._arena = arena
        self.front = arena.borrow(shape, dtype)  # clean: close() hands back both
        self.back = arena.borrow(shape, dtype)  # clean: near miss, flip() only exchanges names and close() hands back both

    def flip(self) -> torch.Tensor:
        self.front, self.back = self.back, self.front
        return self.front

    def resize(self, shape, dtype) -> None:
        if tuple(shape) == tuple(self.front.shape):
            return
        self.close()
        self.front = self._arena.borrow(shape, dtype)  # clean: near miss, close() just handed back the old front
        self.back = self._arena.borrow(shape, dtype)  # clean: held by the object, close() hands it back

    def close(self) -> None:
        self._arena.hand_back(self.front)
        self._arena.hand_back(self.back)


def gather_tail(arena: ShapedArena, chunks: List[torch.Tensor], tail: int, strict: bool) -> torch.Tensor:
    width = chunks[0].shape[-1]
    stage = arena.borrow((tail, width), chunks[0].dtype)  # leak: the strict error is raised with stage on loan
    fill = 0
    for c in chunks:
        n = min(c.shape[0], tail - fill)
        stage[fill:fill + n].copy_(c[:n])
        fill += n
    if fill < tail:
        if strict:
            raise ValueError(f"tail is short by {tail - fill} rows")
        stage[fill:].zero_()
    res = stage.clone()
    arena.hand_back(stage)
    return res
