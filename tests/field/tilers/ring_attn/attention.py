"""Forward passes: plain ring, striped, zig-zag."""
from __future__ import annotations

from typing import Any, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None

from .buffers import Tensor
from .comm import RingComm


def block_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tuple[Any, Any]:
    if torch is None:
        return 0.0, 0.0
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    if causal:
        n, m = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(n, m, device=q.device).triu(1).bool(), float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def merge(out: Any, lse: Any, blk_out: Any, blk_lse: Any) -> Tuple[Any, Any]:
    if out is None or torch is None:
        return blk_out, blk_lse
    new = torch.logaddexp(lse, blk_lse)
    return out * (lse - new).exp() + blk_out * (blk_lse - new).exp(), new


def ring_forward(q: Tensor, k: Tensor, v: Tensor, comm: RingComm, causal: bool = True):
    out: Optional[Any] = None
    lse: Optional[Any] = None
    for step in range(comm.world_size):
        last = step + 1 == comm.world_size
        if not last:
            next_k = comm.send_recv(k)  # leak: k is rebound every step and the received buffer never released
            next_v = comm.send_recv(v)  # leak: v is rebound every step and the received buffer never released
            comm.commit()
        if not causal or step <= comm.rank:
            blk_out, blk_lse = block_attend(q, k, v, causal and step == 0)
            out, lse = merge(out, lse, blk_out, blk_lse)
        if not last:
            comm.wait()
            k, v = next_k, next_v
    return out, lse


def striped_forward(q: Tensor, k: Tensor, v: Tensor, comm: RingComm):
    pool = comm.pool
    cur_k, cur_v, ours = k, v, False
    out = lse = None
    for step in range(comm.world_size):
        last = step + 1 == comm.world_size
        if not last:
            nk = comm.send_recv(cur_k)  # clean: near miss, released one step later through cur_k
            nv = comm.send_recv(cur_v)  # clean: near miss, released one step later through cur_v
            comm.commit()
        blk_out, blk_lse = block_attend(q, cur_k, cur_v, causal=True)
        out, lse = merge(out, lse, blk_out, blk_lse)
        if not last:
            comm.wait()
        if ours:
            pool.release(cur_k)
            pool.release(cur_v)
        if not last:
            cur_k, cur_v, ours = nk, nv, True
    return out, lse


def zigzag_forward(q: Tensor, kv: Tensor, comm: RingComm):
    cur, borrowed = kv, False
    out = lse = None
    for step in range(comm.world_size):
        nxt = comm.send_recv(cur)  # leak: the future-block branch rebinds cur and continues past the release
        comm.commit()
        src = (comm.rank - step) % comm.world_size
        if src > comm.rank:
            comm.wait()
            cur, borrowed = nxt, True
            continue
        blk_out, blk_lse = block_attend(q, cur, cur, causal=step == 0)
        out, lse = merge(out, lse, blk_out, blk_lse)
        comm.wait()
        if borrowed:
            comm.pool.release(cur)
        cur, borrowed = nxt, True
    if borrowed:
        comm.pool.release(cur)
    return out, lse


def snapshot_blocks(kv: Tensor, comm: RingComm) -> List[Any]:
    """Host copies of every block seen by this rank, for numerics debugging."""
    if comm.world_size == 1:
        return []
    seen: List[Tensor] = []
    cur = comm.stage(kv)  # clean: owned by the communicator until wait()
    for _ in range(comm.world_size - 1):
        nxt = comm.send_recv(cur)  # leak: kept in seen, only copies are returned and the list is dropped
        comm.commit()
        comm.wait()
        seen.append(nxt)
        cur = nxt
    return [bytes(b) if torch is None else b.float().cpu() for b in seen]
