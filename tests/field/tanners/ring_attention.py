"""Ring attention for the 1M-context path.

KV chunks travel around the ring in communication buffers that come from a fixed pool
registered with NCCL at start-up.
"""
from __future__ import annotations

import math
from typing import Any, Callable, List, Optional, Sequence, Tuple

try:
    import torch
    import torch.distributed as dist
except ImportError:  # CPU-only tooling imports this module for the planner
    torch = None
    dist = None


class CommBufferPool:
    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self._make = make
        self._ready: List[Any] = [make() for _ in range(count)]
        self._out = 0

    def checkout(self) -> Any:
        if not self._ready:
            raise RuntimeError("communication buffers exhausted")
        self._out += 1
        return self._ready.pop()

    def checkin(self, buf: Any) -> None:
        self._out -= 1
        self._ready.append(buf)

    @property
    def outstanding(self) -> int:
        return self._out


def merge_partials(acc, lse, out, out_lse):
    if acc is None:
        return out, out_lse
    new = torch.logaddexp(lse, out_lse)
    acc = acc * torch.exp(lse - new).unsqueeze(-1) + out * torch.exp(out_lse - new).unsqueeze(-1)
    return acc, new


def block_attention(q, kv, scale: float, causal: bool) -> Tuple[Any, Any]:
    k, v = kv.unbind(0)
    s = torch.matmul(q, k.transpose(-1, -2)) * scale
    if causal:
        s = s + torch.full(s.shape[-2:], float("-inf"), device=s.device).triu(1)
    lse = torch.logsumexp(s, dim=-1)
    return torch.matmul(torch.softmax(s, dim=-1), v), lse


class RingExchange:
    """Posts a send of one buffer and a receive in another."""

    def __init__(self, pool: CommBufferPool, rank: int, world: int) -> None:
        self.pool = pool
        self.rank = rank
        self.world = world
        self._inflight: List[Tuple[Any, List[Any]]] = []

    def post(self, outgoing: Any) -> Any:
        incoming = self.pool.checkout()  # clean: handed to the caller and waited on by it
        ops = [
            dist.P2POp(dist.isend, outgoing, (self.rank + 1) % self.world),
            dist.P2POp(dist.irecv, incoming, (self.rank - 1) % self.world),
        ]
        self._inflight.append((incoming, dist.batch_isend_irecv(ops)))
        return incoming

    def wait(self, incoming: Any) -> None:
        for i, (buf, works) in enumerate(self._inflight):
            if buf is incoming:
                for w in works:
                    w.wait()
                del self._inflight[i]
                return


def ring_forward(q, kv, pool: CommBufferPool, ex: RingExchange, causal: bool = True):
    scale = 1.0 / math.sqrt(q.shape[-1])
    acc = lse = None
    cur = pool.checkout()  # clean: near miss, each hop gives back the one that it replaces
    cur.copy_(kv)
    for step in range(ex.world):
        nxt = None
        if step + 1 < ex.world:
            nxt = ex.post(cur)  # clean: becomes the current buffer of the next hop
        src = (ex.rank - step) % ex.world
        if not causal or src <= ex.rank:
            out, out_lse = block_attention(q, cur, scale, causal and src == ex.rank)
            acc, lse = merge_partials(acc, lse, out, out_lse)
        if nxt is not None:
            ex.wait(nxt)
        pool.checkin(cur)
        cur = nxt
    return acc, lse


def ring_forward_ragged(q, kv, pool: CommBufferPool, ex: RingExchange, lengths: Sequence[int]):
    """Ragged variant: ranks past the end of the document hold empty chunks."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    acc = lse = None
    cur = pool.checkout()  # leak: the chunk in hand at the first empty length is dropped by break
    cur.copy_(kv)
    for step in range(ex.world):
        if lengths[(ex.rank - step) % ex.world] == 0:
            break
        nxt = ex.post(cur)  # leak: last received chunk stays out after the loop
        out, out_lse = block_attention(q, cur, scale, step == 0)
        acc, lse = merge_partials(acc, lse, out, out_lse)
        ex.wait(nxt)
        pool.checkin(cur)
        cur = nxt
    return acc, lse


def ring_backward(grad_out, q, kv, pool: CommBufferPool, ex: RingExchange):
    """dKV accumulates in the travelling buffer, so two buffers go round."""
    kv_buf = pool.checkout()  # clean: checked in after the loop through the rotating name
    dkv_buf = pool.checkout()  # leak: rebound to the received buffer without a checkin
    kv_buf.copy_(kv)
    dkv_buf.zero_()
    for _ in range(ex.world):
        _accumulate_dkv(grad_out, q, kv_buf, dkv_buf)
        nxt_kv = ex.post(kv_buf)  # clean: rotates in, the old one is checked in
        nxt_dkv = ex.post(dkv_buf)  # leak: on every hop but the last it is overwritten
        ex.wait(nxt_kv)
        ex.wait(nxt_dkv)
        pool.checkin(kv_buf)
        kv_buf, dkv_buf = nxt_kv, nxt_dkv
    result = dkv_buf.clone()
    pool.checkin(dkv_buf)
    pool.checkin(kv_buf)
    return result


def _accumulate_dkv(grad_out, q, kv_buf, dkv_buf) -> None:
    k, _ = kv_buf.unbind(0)
    p = torch.softmax(torch.matmul(q, k.transpose(-1, -2)), dim=-1)
    dkv_buf[1].add_(torch.matmul(p.transpose(-1, -2), grad_out))


def swap_halves(pool: CommBufferPool, ex: RingExchange, a: Any, b: Any) -> None:
    """Zig-zag rebalancing before the first hop; a and b belong to the caller."""
    tmp = pool.checkout()  # clean: near miss, checked in under a second name
    spare = tmp
    tmp.copy_(a)
    a.copy_(b)
    b.copy_(tmp)
    pool.checkin(spare)


def gather_lse(lse, pool: CommBufferPool, ex: RingExchange) -> Optional[Any]:
    if ex.world == 1:
        return lse
    flat = pool.checkout()  # leak: ranks other than 0 return before checkin
    flat.view(-1)[: lse.numel()].copy_(lse.reshape(-1))
    dist.reduce(flat, dst=0, op=dist.ReduceOp.MAX)
    if ex.rank != 0:
        return None
    out = flat.view(-1)[: lse.numel()].reshape(lse.shape).clone()
    pool.checkin(flat)
    return out


def probe_bandwidth(pool: CommBufferPool, ex: RingExchange, rounds: int = 4) -> int:
    moved = 0
    for _ in range(rounds):
        buf = pool.checkout()  # clean: near miss, the break comes after checkin
        try:
            back = ex.post(buf)  # clean: checked in below once waited
            ex.wait(back)
            moved += buf.numel()
            pool.checkin(back)
        finally:
            pool.checkin(buf)
        if moved > 1 << 30:
            break
    return moved
