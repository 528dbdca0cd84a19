"""Ring attention: each rank holds a query block and passes K/V around the ring."""
from __future__ import annotations

import contextlib
import math
from typing import Iterator

import torch
import torch.distributed as dist


class KVRing:
    """Double-buffered K/V blocks of one shape, kept on a free stack.

    lend() grows the stack on demand; settle() takes a block back.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._stack: list[torch.Tensor] = []
        self.lent = 0

    def lend(self) -> torch.Tensor:
        self.lent += 1
        if self._stack:
            return self._stack.pop()  # clean: handed to the caller
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def settle(self, block: torch.Tensor | None) -> None:
        if block is None:
            return
        self.lent -= 1
        self._stack.append(block)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[torch.Tensor]:
        block = self.lend()  # clean: settled in the finally of the context manager
        try:
            yield block
        finally:
            self.settle(block)


def _neighbours(group) -> tuple[int, int]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    return (rank + 1) % world, (rank - 1) % world


def _exchange(send: torch.Tensor, recv: torch.Tensor, group) -> list[dist.Work]:
    nxt, prev = _neighbours(group)
    ops = [
        dist.P2POp(dist.isend, send, nxt, group),
        dist.P2POp(dist.irecv, recv, prev, group),
    ]
    return dist.batch_isend_irecv(ops)


def _block(q, k, v, causal: bool):
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(s, dim=-1, keepdim=True)
    return torch.exp(s - lse) @ v, lse


def _merge(out, lse, o, l):
    new = torch.logaddexp(lse, l)
    return out * torch.exp(lse - new) + o * torch.exp(l - new), new


def ring_forward(ring: KVRing, q, k, v, group, causal: bool = True):
    """K and V travel packed as one tensor of ring.shape = (2, b, h, s, d)."""
    world = dist.get_world_size(group)
    rank = dist.get_rank(group)
    cur = ring.lend()  # clean: near miss, swapped with nxt each step, both settled at the end
    nxt = ring.lend()  # clean: near miss, swapped with cur each step, both settled at the end
    cur.copy_(torch.stack((k, v)))
    out, lse = _block(q, k, v, causal)
    for step in range(1, world):
        for w in _exchange(cur, nxt, group):
            w.wait()
        cur, nxt = nxt, cur
        src = (rank - step) % world
        if causal and src > rank:
            continue
        o, l = _block(q, cur[0], cur[1], False)
        out, lse = _merge(out, lse, o, l)
    ring.settle(cur)
    ring.settle(nxt)
    return out, lse


def ring_forward_overlapped(ring: KVRing, q, k, v, group):
    world = dist.get_world_size(group)
    cur = ring.lend()  # clean: settled when it is replaced by incoming
    cur.copy_(torch.stack((k, v)))
    out = lse = None
    for step in range(world):
        incoming, works = None, []
        if step + 1 < world:
            incoming = ring.lend()  # clean: near miss, becomes cur and is settled a step later
            works = _exchange(cur, incoming, group)
        o, l = _block(q, cur[0], cur[1], False)
        if out is None:
            out, lse = o, l
        else:
            out, lse = _merge(out, lse, o, l)
        for w in works:
            w.wait()
        ring.settle(cur)
        cur = incoming
    return out, lse


def ring_backward(ring: KVRing, dout, q, k, v, lse, group):
    world = dist.get_world_size(group)
    kv = ring.lend()  # leak: rebound to the received block each step, only the last one is settled
    kv.copy_(torch.stack((k, v)))
    dkv = ring.lend()  # clean: settled after it is cloned
    dkv.zero_()
    dq = torch.zeros_like(q)
    for step in range(world):
        p = torch.exp(torch.einsum("bhqd,bhkd->bhqk", q, kv[0]) / math.sqrt(q.shape[-1]) - lse)
        dkv[1] += p.transpose(-1, -2) @ dout
        ds = p * (dout @ kv[1].transpose(-1, -2))
        dq += ds @ kv[0]
        dkv[0] += ds.transpose(-1, -2) @ q
        if step + 1 == world:
            break
        recv = ring.lend()  # leak: becomes kv and is lost when the next step rebinds kv
        for w in _exchange(kv, recv, group):
            w.wait()
        kv = recv
        _rotate_grad(ring, dkv, group)
    grads = dkv.clone()
    ring.settle(dkv)
    ring.settle(kv)
    return dq, grads[0], grads[1]


def _rotate_grad(ring: KVRing, dkv: torch.Tensor, group) -> None:
    with ring.scratch() as tmp:  # clean: context manager
        for w in _exchange(dkv, tmp, group):
            w.wait()
        dkv.copy_(tmp)


def pack_kv(ring: KVRing, k, v) -> torch.Tensor:
    block = ring.lend()  # clean: returned to the caller, who owns it
    block[0].copy_(k)
    block[1].copy_(v)
    return block


def kv_to_host(ring: KVRing, k, v) -> torch.Tensor:
    return pack_kv(ring, k, v).cpu()  # leak: the pooled block is copied to the host and dropped


class RingCache:
    """Decode-time K/V kept around the ring between calls."""

    def __init__(self, ring: KVRing) -> None:
        self.ring = ring
        self.blocks: dict[int, torch.Tensor] = {}
        self.prefixes: dict[str, torch.Tensor] = {}

    def put(self, seq: int, k, v) -> None:
        old = self.blocks.pop(seq, None)
        self.ring.settle(old)
        self.blocks[seq] = pack_kv(self.ring, k, v)  # clean: the earlier block of the sequence was settled first

    def fork(self, src: int, dst: int) -> bool:
        twin = self.ring.lend()  # leak: not settled when the source sequence is unknown
        base = self.blocks.get(src)
        if base is None or dst in self.blocks:
            return False
        twin.copy_(base)
        self.blocks[dst] = twin
        return True

    def evict(self, seq: int) -> None:
        self.ring.settle(self.blocks.pop(seq, None))

    def splice(self, seq: int, keep: int) -> None:
        old = self.blocks[seq]
        fresh = self.ring.lend()  # clean: stored in the table in place of old, which is settled
        fresh[..., :keep, :].copy_(old[..., -keep:, :])
        self.blocks[seq] = fresh
        self.ring.settle(old)

    def freeze_prefix(self, name: str, k, v) -> None:
        self.prefixes[name] = pack_kv(self.ring, k, v)  # leak: freezing a name again overwrites the block in the table

    def clear(self) -> None:
        while self.prefixes:
            self.ring.settle(self.prefixes.popitem()[1])
        for seq in list(self.blocks):
            self.evict(seq)
