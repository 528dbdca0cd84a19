"""Ring attention with double-buffered key/value exchange.

Receive buffers are drawn from a per-shape free list so that steady-state
training does not touch the caching allocator.
"""
import collections
import math

import torch
import torch.distributed as dist
from torch import nn


class RingBufferPool:
    """Free lists keyed by (shape, dtype)."""

    def __init__(self, device="cpu", limit=32):
        self.device = device
        self.limit = limit
        self._free = collections.defaultdict(list)
        self.outstanding = 0

    def take(self, shape, dtype):
        key = (tuple(shape), dtype)
        bucket = self._free[key]
        if bucket:
            buf = bucket.pop()  # clean: handed to the caller
        else:
            buf = torch.empty(shape, dtype=dtype, device=self.device)
        self.outstanding += 1
        return buf

    def give_back(self, buf):
        self.outstanding -= 1
        self._free[(tuple(buf.shape), buf.dtype)].append(buf)

    def warm(self, shape, dtype, count):
        bufs = []
        for _ in range(count):
            bufs.append(self.take(shape, dtype))  # clean: near miss, all are given back by the loop below
        for b in bufs:
            self.give_back(b)


POOL = RingBufferPool()


class RingComm:
    def __init__(self, group, pool=POOL):
        self.group = group
        self.pool = pool
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def exchange(self, tensor):
        """Send ``tensor`` to the right, return the buffer received from the left."""
        recv = self.pool.take(tensor.shape, tensor.dtype)  # clean: handed to the caller
        ops = [
            dist.P2POp(dist.isend, tensor, (self.rank + 1) % self.world, self.group),
            dist.P2POp(dist.irecv, recv, (self.rank - 1) % self.world, self.group),
        ]
        for req in dist.batch_isend_irecv(ops):
            req.wait()
        return recv

    def exchange_pair(self, k, v):
        return self.exchange(k), self.exchange(v)  # clean: near miss, both go to the caller in a tuple

    def peek_lengths(self, lengths):
        remote = self.exchange(lengths)  # leak: only the list of values leaves, the buffer is dropped
        return remote.tolist()

    def checksum(self, tensor):
        remote = self.exchange(tensor)  # clean: near miss, given back after the reduction to a float
        total = float(remote.double().sum())
        self.pool.give_back(remote)
        return total


def merge_partial(out, lse, block_out, block_lse):
    new_lse = torch.logaddexp(lse, block_lse)
    out = out * torch.exp(lse - new_lse) + block_out * torch.exp(block_lse - new_lse)
    return out, new_lse


def block_attend(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    return torch.softmax(scores, dim=-1) @ v, lse


class RingAttention(nn.Module):
    def __init__(self, dim, heads, comm, causal=True):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.comm = comm
        self.causal = causal

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out, lse = block_attend(q, k, v)
        held = None
        for step in range(1, self.comm.world):
            k, v = self.comm.exchange_pair(k.contiguous(), v.contiguous())  # clean: near miss, held pair is given back in the next round or after the loop
            if held is not None:
                for old in held:
                    self.comm.pool.give_back(old)
            held = (k, v)
            if self.causal and step > self.comm.rank:
                continue
            o, s = block_attend(q, k, v)
            out, lse = merge_partial(out, lse, o, s)
        if held is not None:
            for old in held:
                self.comm.pool.give_back(old)
        return out.transpose(1, 2).reshape(b, n, d)

    @torch.no_grad()
    def evaluate(self, q, k, v):
        out, lse = block_attend(q, k, v)
        for step in range(1, self.comm.world):
            nk, nv = self.comm.exchange_pair(k, v)  # leak: each round's pair is overwritten by the next, none given back
            k, v = nk, nv
            o, s = block_attend(q, k, v)
            out, lse = merge_partial(out, lse, o, s)
        return out

    @torch.no_grad()
    def key_norms(self, k):
        norms = [k.norm(dim=-1)]
        cur = k
        for step in range(1, self.comm.world):
            nxt = self.comm.exchange(cur)  # leak: the causal continue skips the give_back of the earlier buffer
            if self.causal and step > self.comm.rank:
                cur = nxt
                continue
            norms.append(nxt.norm(dim=-1))
            if cur is not k:
                self.comm.pool.give_back(cur)
            cur = nxt
        if cur is not k:
            self.comm.pool.give_back(cur)
        return torch.cat(norms, dim=-1)
