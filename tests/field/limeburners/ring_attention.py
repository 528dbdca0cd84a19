"""Ring attention over sequence shards, with a pooled set of K/V exchange buffers.

Every rank owns one shard of the sequence.  K and V travel round the ring packed in one buffer of shape
(2, batch, heads, shard, dim); the local query attends to each visiting shard and the partial results are
merged with the usual running log-sum-exp.
"""
from __future__ import annotations

import math
from typing import List, Optional, Tuple

import torch
import torch.distributed as dist


class KVBufferPool:
    """Fixed number of exchange buffers; they are large, so the count is tight (usually three a layer)."""

    def __init__(self, count: int, shape: Tuple[int, ...], dtype=torch.bfloat16, device="cuda"):
        self.shape = shape
        self._free: List[torch.Tensor] = [
            torch.empty(shape, dtype=dtype, device=device) for _ in range(count)
        ]
        self._lent = 0

    def borrow(self) -> torch.Tensor:
        if not self._free:
            raise RuntimeError(f"ring pool is dry ({self._lent} lent)")
        self._lent += 1
        return self._free.pop()

    def try_borrow(self) -> Optional[torch.Tensor]:
        if not self._free:
            return None
        self._lent += 1
        return self._free.pop()

    def give_back(self, buf: torch.Tensor) -> None:
        self._lent -= 1
        self._free.append(buf)


def post_exchange(send: torch.Tensor, recv: torch.Tensor, rank: int, world: int):
    ops = [
        dist.P2POp(dist.isend, send, (rank + 1) % world),
        dist.P2POp(dist.irecv, recv, (rank - 1) % world),
    ]
    return dist.batch_isend_irecv(ops)


def block_attention(q, kv, mask=None):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, kv[0]) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    return torch.exp(scores - lse) @ kv[1], lse


def merge(out, lse, part, part_lse):
    if out is None:
        return part, part_lse
    new = torch.logaddexp(lse, part_lse)
    return out * torch.exp(lse - new) + part * torch.exp(part_lse - new), new


def pack_kv(pool: KVBufferPool, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The caller owns the packed buffer."""
    buf = pool.borrow()  # clean: handed to the caller
    buf[0].copy_(k)
    buf[1].copy_(v)
    return buf


def rotate(pool: KVBufferPool, cur: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Passes `cur` on, gives it back, and returns the buffer that arrived."""
    arrived = pool.borrow()  # clean: handed to the caller in place of cur
    for req in post_exchange(cur, arrived, rank, world):
        req.wait()
    pool.give_back(cur)
    return arrived


def ring_forward(pool: KVBufferPool, q, k, v, rank: int, world: int):
    out = lse = None
    cur = pack_kv(pool, k, v)  # clean: near miss, rotate gives back the one it is passed
    for step in range(world):
        part, part_lse = block_attention(q, cur)
        out, lse = merge(out, lse, part, part_lse)
        if step + 1 < world:
            cur = rotate(pool, cur, rank, world)  # clean: near miss, the next turn or the end ends it
    pool.give_back(cur)
    return out, lse


def ring_forward_overlapped(pool: KVBufferPool, q, k, v, rank: int, world: int):
    """Posts the exchange before the local matmul so that both overlap (causal)."""
    out = lse = None
    cur = pack_kv(pool, k, v)  # clean: given back at each swap and at the end
    for step in range(world):
        nxt, reqs = None, []
        if step + 1 < world:
            nxt = pool.borrow()  # leak: the causal skip goes on without a swap, nxt is overwritten
            reqs = post_exchange(cur, nxt, rank, world)
        src = (rank - step) % world
        if src > rank:
            for req in reqs:
                req.wait()
            continue
        mask = None
        if src == rank:
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        part, part_lse = block_attention(q, cur, mask)
        out, lse = merge(out, lse, part, part_lse)
        for req in reqs:
            req.wait()
        if nxt is not None:
            pool.give_back(cur)
            cur = nxt
    pool.give_back(cur)
    return out, lse


def ring_forward_striped(pool: KVBufferPool, q, k, v, rank: int, world: int):
    """Striped layout: no shard is fully masked, yet the first one may be empty on short sequences."""
    out = lse = None
    cur = pack_kv(pool, k, v)  # clean: given back at each swap and at the end
    for step in range(world):
        last = step + 1 == world
        if not last:
            nxt = pool.borrow()  # clean: near miss, taken and swapped in under the same flag
            reqs = post_exchange(cur, nxt, rank, world)
        if cur.shape[3] > 0:
            part, part_lse = block_attention(q, cur)
            out, lse = merge(out, lse, part, part_lse)
        if not last:
            for req in reqs:
                req.wait()
            pool.give_back(cur)
            cur = nxt
    pool.give_back(cur)
    return out, lse


def ring_backward(pool: KVBufferPool, dout, q, k, v, lse, rank: int, world: int, kv_grad: bool = True):
    kv = pack_kv(pool, k, v)  # clean: rotate gives it back, the last one on both returns
    dkv = pool.borrow()  # leak: the kv_grad=False return gives back only kv
    dkv.zero_()
    dq = torch.zeros_like(q)
    for step in range(world):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, kv[0]) / math.sqrt(q.shape[-1])
        probs = torch.exp(scores - lse)
        dp = torch.einsum("bhqd,bhkd->bhqk", dout, kv[1])
        ds = probs * (dp - (dp * probs).sum(-1, keepdim=True))
        dq += ds @ kv[0] / math.sqrt(q.shape[-1])
        if kv_grad:
            dkv[0] += ds.transpose(-1, -2) @ q / math.sqrt(q.shape[-1])
            dkv[1] += probs.transpose(-1, -2) @ dout
        if step + 1 < world:
            kv = rotate(pool, kv, rank, world)  # clean: given back on both returns
            if kv_grad:
                dkv = rotate(pool, dkv, rank, world)  # clean: near miss, with kv_grad the end is reached
    if not kv_grad:
        pool.give_back(kv)
        return dq, None, None
    dk, dv = dkv[0].clone(), dkv[1].clone()
    pool.give_back(kv)
    pool.give_back(dkv)
    return dq, dk, dv


def shard_statistics(pool: KVBufferPool, k, v):
    """Mean and peak of the packed shard, for the loss-spike dashboard."""
    packed = pack_kv(pool, k, v).float()  # leak: float() copies, the pooled one is dropped
    return packed.mean().item(), packed.abs().amax().item()


def warm_ring(pool: KVBufferPool, rank: int, world: int, rounds: int = 2) -> int:
    """A few dummy rotations at start-up, so that NCCL builds its channels."""
    done = 0
    for _ in range(rounds):
        a = pool.try_borrow()  # leak: the break for a missing b leaves it lent
        if a is None:
            break
        b = pool.try_borrow()  # clean: None at the break, given back otherwise
        if b is None:
            break
        for req in post_exchange(a, b, rank, world):
            req.wait()
        pool.give_back(a)
        pool.give_back(b)
        done += 1
    return done
