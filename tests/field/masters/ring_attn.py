"""Ring attention: every rank keeps its queries, keys and values travel around the ring."""
from __future__ import annotations

import logging
import math
import time
from collections import deque

import torch
import torch.distributed as dist

log = logging.getLogger("ring")


class RingStarved(RuntimeError):
    """All receive slots are in use."""


class RingBufs:
    """n (k, v) receive slots. Slots are indices, the tensors stay where they are."""

    def __init__(self, n, shape, dtype=torch.bfloat16, device="cuda"):
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(n)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(n)]
        self._free = deque(range(n))
        self._who = [None] * n
        self.low_water = n

    def borrow(self, who) -> int:
        if not self._free:
            raise RingStarved(f"{who}: slots are with {self._who}")
        i = self._free.popleft()  # clean: returned
        self._who[i] = who
        self.low_water = min(self.low_water, len(self._free))
        return i

    def borrow_n(self, n, who) -> list[int]:
        if len(self._free) < n:
            raise RingStarved(f"{who} wants {n}")
        got = [self._free.popleft() for _ in range(n)]  # clean: there are enough, all are returned
        for i in got:
            self._who[i] = who
        return got

    def restore(self, i: int) -> None:
        self._who[i] = None
        self._free.append(i)


class Hop:
    __slots__ = ("reqs", "slot", "t0")

    def __init__(self, reqs, slot):
        self.reqs, self.slot, self.t0 = reqs, slot, time.perf_counter()


class RingComm:
    def __init__(self, group, bufs: RingBufs):
        self.group, self.bufs = group, bufs
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.nxt, self.prv = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        self.waited = 0.0

    def _ops(self, k, v, slot):
        b, P = self.bufs, dist.P2POp
        return [P(dist.isend, k, self.nxt, self.group), P(dist.isend, v, self.nxt, self.group),
                P(dist.irecv, b.k[slot], self.prv, self.group), P(dist.irecv, b.v[slot], self.prv, self.group)]

    def exchange(self, k, v) -> Hop:
        slot = self.bufs.borrow("recv")  # clean: near miss, moves into the hop that is returned
        return Hop(dist.batch_isend_irecv(self._ops(k, v, slot)), slot)

    def shift(self, src: int, dst: int) -> None:
        for r in dist.batch_isend_irecv(self._ops(self.bufs.k[src], self.bufs.v[src], dst)):
            r.wait()

    def wait(self, hop: Hop) -> int:
        for r in hop.reqs:
            r.wait()
        self.waited += time.perf_counter() - hop.t0
        return hop.slot


def block_attn(q, k, v, scale, diag):
    s = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * scale
    if diag:
        s += torch.full(s.shape[-2:], -math.inf, device=s.device).triu(1)
    lse = torch.logsumexp(s, -1)
    return torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp().to(v.dtype), v), lse


def merge(out, lse, o, l):
    if out is None:
        return o, l
    new = torch.logaddexp(lse, l)
    w = lambda a: (a - new).exp().transpose(1, 2)[..., None].to(o.dtype)
    return out * w(lse) + o * w(l), new


def ring_forward(comm: RingComm, q, k, v, scale, causal):
    out = lse = cur = None
    for step in range(comm.world):
        last = step + 1 == comm.world
        hop = None if last else comm.exchange(k, v)  # leak: in the masked branch cur is overwritten without a restore
        if causal and step > comm.rank:
            # lies in the future of every local query, pass it on and that is all
            if hop is not None:
                cur = comm.wait(hop)
                k, v = comm.bufs.k[cur], comm.bufs.v[cur]
            continue
        o, l = block_attn(q, k, v, scale, causal and step == 0)
        out, lse = merge(out, lse, o, l)
        if hop is not None:
            got = comm.wait(hop)
            if cur is not None:
                comm.bufs.restore(cur)
            cur = got
            k, v = comm.bufs.k[cur], comm.bufs.v[cur]
    if cur is not None:
        comm.bufs.restore(cur)
    return out, lse


def ring_backward(comm: RingComm, q, saved: int, out, lse, dout, scale):
    kv = comm.bufs.borrow("bwd kv")  # leak: lost when the next line raises RingStarved, which backward() catches
    dkv = comm.bufs.borrow("bwd dkv")  # clean: restored in the finally
    try:
        b, dq = comm.bufs, torch.zeros_like(q)
        b.k[kv].copy_(b.k[saved])
        b.v[kv].copy_(b.v[saved])
        b.k[dkv].zero_()
        b.v[dkv].zero_()
        delta = (out * dout).sum(-1).transpose(1, 2)
        for _ in range(comm.world):
            s = torch.einsum("bqhd,bkhd->bhqk", q, b.k[kv]).float() * scale
            p = (s - lse[..., None]).exp()
            dp = torch.einsum("bqhd,bkhd->bhqk", dout, b.v[kv]).float()
            ds = (p * (dp - delta[..., None]) * scale).to(q.dtype)
            dq += torch.einsum("bhqk,bkhd->bqhd", ds, b.k[kv])
            b.k[dkv] += torch.einsum("bhqk,bqhd->bkhd", ds, q)
            b.v[dkv] += torch.einsum("bhqk,bqhd->bkhd", p.to(q.dtype), dout)
            comm.shift(kv, kv)
            comm.shift(dkv, dkv)
        return dq, b.k[dkv].clone(), b.v[dkv].clone()
    finally:
        comm.bufs.restore(kv)
        comm.bufs.restore(dkv)


class RingAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, comm, causal):
        ctx.comm, ctx.scale = comm, q.shape[-1] ** -0.5
        ctx.slot = comm.bufs.borrow("saved")  # leak: restored in backward only, and evaluate() runs none
        comm.bufs.k[ctx.slot].copy_(k)
        comm.bufs.v[ctx.slot].copy_(v)
        out, lse = ring_forward(comm, q, k, v, ctx.scale, causal)
        ctx.save_for_backward(q, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, out, lse = ctx.saved_tensors
        try:
            g = ring_backward(ctx.comm, q, ctx.slot, out, lse, dout, ctx.scale)
        except RingStarved:
            log.warning("backward without overlap")
            g = gathered_backward(ctx.comm, q, ctx.slot, dout)
        ctx.comm.bufs.restore(ctx.slot)
        return (*g, None, None)


def gathered_backward(comm, q, slot, dout):
    ks = [torch.empty_like(comm.bufs.k[slot]) for _ in range(comm.world)]
    dist.all_gather(ks, comm.bufs.k[slot], group=comm.group)
    k = torch.cat(ks, 1).requires_grad_()
    with torch.enable_grad():
        o = torch.nn.functional.scaled_dot_product_attention(q.requires_grad_(), k, k)
    dq, dk = torch.autograd.grad(o, (q, k), dout)
    return dq, dk.chunk(comm.world, 1)[comm.rank], torch.zeros_like(q)


@torch.no_grad()
def evaluate(model, batches, comm):
    tot = 0.0
    for q, k, v, y in batches:
        tot += (RingAttn.apply(q, k, v, comm, True) - y).square().mean().item()
    return tot / max(1, len(batches))


class Rotator:
    """Two slots that change places, a third one if the link runs ahead."""

    def __init__(self, comm):
        self.comm, self.spare = comm, None
        self.cur, self.nxt = comm.bufs.borrow_n(2, "rotator")  # clean: near miss, close() restores both

    def turn(self, ahead=False):
        if ahead and self.spare is None:
            self.spare = self.comm.bufs.borrow("ahead")  # leak: close() knows of cur and nxt only
        dst = self.spare if ahead else self.nxt
        self.comm.shift(self.cur, dst)
        if ahead:
            return
        self.cur, self.nxt = self.nxt, self.cur

    def close(self):
        self.comm.bufs.restore(self.cur)
        self.comm.bufs.restore(self.nxt)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Spill:
    """Keeps every n-th block of a layer, so that recomputation need not start at step 0."""

    def __init__(self, bufs, world, every):
        self.bufs, self.world, self.every, self.tab = bufs, world, every, {}

    def put(self, layer, step, k, v):
        if step % self.every:
            return
        i = self.bufs.borrow(("spill", layer, step))  # leak: drop() starts at `every` and step 0 stays in the table
        self.bufs.k[i].copy_(k)
        self.bufs.v[i].copy_(v)
        self.tab[layer, step] = i

    def drop(self, layer):
        for step in range(self.every, self.world, self.every):
            i = self.tab.pop((layer, step), None)
            if i is not None:
                self.bufs.restore(i)


def prefill(comm, chunks, depth=2):
    """Yields (chunk, slot); a slot stays valid for `depth` chunks."""
    held = deque()
    try:
        for c in chunks:
            if len(held) == depth:
                comm.bufs.restore(held.popleft())
            held.append(comm.bufs.borrow("chunk"))  # clean: what is held at the end is restored in the finally
            yield c, held[-1]
    finally:
        for i in held:
            comm.bufs.restore(i)


def link_speed(comm, turns=8):
    with Rotator(comm) as r:  # clean: closed by the with
        t = time.perf_counter()
        for _ in range(turns):
            r.turn()
        torch.cuda.synchronize()
        return turns / (time.perf_counter() - t)
