"""Ring attention over a sequence-parallel group; every block lives in a slab of one pool."""
import math

import torch
import torch.distributed as dist


class SlabPool:
    def __init__(self, device):
        self.device = device
        self._idle = {}
        self.lent = 0

    def rent(self, shape, dtype):
        idle = self._idle.get((tuple(shape), dtype))
        self.lent += 1
        if idle:
            return idle.pop()
        return torch.empty(shape, dtype=dtype, device=self.device)

    def give(self, slab):
        self.lent -= 1
        self._idle.setdefault((tuple(slab.shape), slab.dtype), []).append(slab)


def _exchange(group, rank, world, *pairs):
    ops = []
    for src, dst in pairs:
        ops.append(dist.P2POp(dist.isend, src, (rank + 1) % world, group))
        ops.append(dist.P2POp(dist.irecv, dst, (rank - 1) % world, group))
    return dist.batch_isend_irecv(ops)


def _merge(acc, lse, blk, blk_lse):
    if acc is None:
        return blk, blk_lse
    new = torch.logaddexp(lse, blk_lse)
    return acc * torch.exp(lse - new) + blk * torch.exp(blk_lse - new), new


def block_probs(pool, q, k, scale, diagonal):
    """Normalised probabilities of one block in a slab (the caller's), and its row log-sum."""
    probs = pool.rent((*q.shape[:-1], k.shape[-2]), torch.float32)  # clean: handed to the caller
    torch.matmul(q.float(), k.float().transpose(-1, -2), out=probs)
    probs.mul_(scale)
    if diagonal:
        n, m = probs.shape[-2:]
        future = torch.ones(n, m, dtype=torch.bool, device=probs.device).triu_(1)
        probs.masked_fill_(future, float("-inf"))
    lse = torch.logsumexp(probs, -1, keepdim=True)
    probs.sub_(lse).exp_()
    return probs, lse


def ring_forward(pool, group, q, k, v, causal=True):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    scale = 1.0 / math.sqrt(q.shape[-1])
    if world == 1:
        probs, lse = block_probs(pool, q, k, scale, causal)  # clean: given before the return
        out = torch.matmul(probs, v.float()).to(q.dtype)
        pool.give(probs)
        return out, lse.squeeze(-1)
    cur_k = pool.rent(k.shape, k.dtype)  # clean: near miss, swapped each step, both names given at the end
    cur_v = pool.rent(v.shape, v.dtype)  # clean: near miss, swapped each step, both names given at the end
    cur_k.copy_(k)
    cur_v.copy_(v)
    nxt_k = pool.rent(k.shape, k.dtype)  # clean: near miss, the other half of the ping-pong
    nxt_v = pool.rent(v.shape, v.dtype)  # clean: near miss, the other half of the ping-pong
    acc = lse = None
    for step in range(world):
        src = (rank - step) % world
        works = []
        if step + 1 < world:
            works = _exchange(group, rank, world, (cur_k, nxt_k), (cur_v, nxt_v))
        if not causal or src <= rank:
            probs, blk_lse = block_probs(pool, q, cur_k, scale, causal and src == rank)  # clean: given below
            blk = torch.matmul(probs, cur_v.float())
            pool.give(probs)
            acc, lse = _merge(acc, lse, blk, blk_lse)
        for work in works:
            work.wait()
        cur_k, nxt_k = nxt_k, cur_k
        cur_v, nxt_v = nxt_v, cur_v
    for slab in (cur_k, cur_v, nxt_k, nxt_v):
        pool.give(slab)
    return acc.to(q.dtype), lse.squeeze(-1)


def ring_forward_cross(pool, group, q, k, v, need_lse=False):
    """Full (not causal) attention; the last block has no exchange behind it and is kept apart."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    scale = q.shape[-1] ** -0.5
    kv = pool.rent((2, *k.shape), k.dtype)  # clean: the current one is given after the last block
    kv[0].copy_(k)
    kv[1].copy_(v)
    acc = lse = None
    for _ in range(world - 1):
        spare = pool.rent((2, *k.shape), k.dtype)  # clean: near miss, becomes kv, the old kv is given
        works = _exchange(group, rank, world, (kv, spare))
        key, value = kv.unbind(0)
        probs, blk_lse = block_probs(pool, q, key, scale, False)  # clean: given after the product
        blk = torch.matmul(probs, value.float())
        pool.give(probs)
        acc, lse = _merge(acc, lse, blk, blk_lse)
        for work in works:
            work.wait()
        kv, done = spare, kv
        pool.give(done)
    key, value = kv.unbind(0)
    probs, blk_lse = block_probs(pool, q, key, scale, False)  # leak: last block's slab is dropped after the product
    acc, lse = _merge(acc, lse, torch.matmul(probs, value.float()), blk_lse)
    pool.give(kv)
    out = acc.to(q.dtype)
    if need_lse:
        return out, lse.squeeze(-1)
    return out, None


def ring_backward(pool, group, q, k, v, out, lse, grad, causal=True):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    scale = q.shape[-1] ** -0.5
    delta = pool.rent(lse.shape, torch.float32)  # clean: given at the end
    torch.sum(grad.float() * out.float(), -1, out=delta)
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk = pool.rent(k.shape, torch.float32)  # leak: rebound to the received one when the ring turns
    dv = pool.rent(v.shape, torch.float32)  # clean: near miss, the old one is given before each rebinding
    dk.zero_()
    dv.zero_()
    key, value = k, v
    for step in range(world):
        src = (rank - step) % world
        if not causal or src <= rank:
            s = pool.rent((*q.shape[:-1], key.shape[-2]), torch.float32)  # clean: given in this branch
            torch.matmul(q.float(), key.float().transpose(-1, -2), out=s)
            s.mul_(scale).sub_(lse.unsqueeze(-1)).exp_()
            if causal and src == rank:
                s.tril_()
            dv.add_(s.transpose(-1, -2) @ grad.float())
            ds = s.mul_(grad.float() @ value.float().transpose(-1, -2) - delta.unsqueeze(-1))
            dq.add_(ds @ key.float(), alpha=scale)
            dk.add_(ds.transpose(-1, -2) @ q.float(), alpha=scale)
            pool.give(ds)
        if step == world - 1:
            break
        got_k, got_v = torch.empty_like(key), torch.empty_like(value)
        got_dk = pool.rent(dk.shape, torch.float32)  # leak: as dk it is itself overwritten a turn later
        got_dv = pool.rent(dv.shape, torch.float32)  # clean: near miss, becomes dv, given a turn later or at the end
        pairs = ((key, got_k), (value, got_v), (dk, got_dk), (dv, got_dv))
        for work in _exchange(group, rank, world, *pairs):
            work.wait()
        key, value = got_k, got_v
        dk = got_dk
        pool.give(dv)
        dv = got_dv
    grads = dq.to(q.dtype), dk.clone(), dv.clone()
    for slab in (delta, dk, dv):
        pool.give(slab)
    return grads
