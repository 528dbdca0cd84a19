"""Ring attention: K/V blocks travel round the sequence-parallel group."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator

import torch


@dataclass
class KVBlock:
    slot: int
    k: torch.Tensor
    v: torch.Tensor
    seq_start: int = -1


class KVArena:
    """Slots for K/V blocks of one size; a slot is rented and must be surrendered."""

    def __init__(self, slots: int, heads: int, block_len: int, dim: int, device: str = "cuda") -> None:
        self._k = torch.empty(slots, heads, block_len, dim, device=device)
        self._v = torch.empty_like(self._k)
        self._idle = list(range(slots))

    def rent(self, seq_start: int = -1) -> KVBlock:
        if not self._idle:
            raise RuntimeError("K/V arena exhausted")
        slot = self._idle.pop()
        return KVBlock(slot, self._k[slot], self._v[slot], seq_start)

    def surrender(self, block: KVBlock) -> None:
        self._idle.append(block.slot)

    @property
    def idle(self) -> int:
        return len(self._idle)


class RingComm:
    def __init__(self, rank: int, size: int, link) -> None:
        self.rank, self.size, self._link = rank, size, link

    def exchange(self, out: KVBlock, into: KVBlock) -> None:
        self._link.send((self.rank + 1) % self.size, out.k, out.v, out.seq_start)
        into.seq_start = self._link.recv((self.rank - 1) % self.size, into.k, into.v)


class OnlineSoftmax:
    def __init__(self, q: torch.Tensor) -> None:
        self.q = q / math.sqrt(q.shape[-1])
        self.out = torch.zeros_like(q)
        self.lse = torch.full(q.shape[:-1], -torch.inf, device=q.device)

    def update(self, block: KVBlock) -> None:
        s = self.q @ block.k.transpose(-1, -2)
        new = torch.logaddexp(self.lse, s.logsumexp(-1))
        self.out = self.out * (self.lse - new).exp().unsqueeze(-1)
        self.out = self.out + (s - new.unsqueeze(-1)).exp() @ block.v
        self.lse = new


def fill(block: KVBlock, k: torch.Tensor, v: torch.Tensor) -> KVBlock:
    block.k.copy_(k)
    block.v.copy_(v)
    return block


def ring_forward(q, k, v, arena: KVArena, comm: RingComm) -> torch.Tensor:
    here = arena.rent(comm.rank)  # clean: near miss, swapped in each step, both names are surrendered
    spare = arena.rent()  # clean: near miss, swapped in each step, both names are surrendered
    fill(here, k, v)
    acc = OnlineSoftmax(q)
    for step in range(comm.size):
        if step + 1 < comm.size:
            comm.exchange(here, spare)
        acc.update(here)
        here, spare = spare, here
    arena.surrender(here)
    arena.surrender(spare)
    return acc.out


def ring_forward_causal(q, k, v, arena: KVArena, comm: RingComm) -> torch.Tensor:
    here = arena.rent(comm.rank)  # clean: surrendered in the loop or after it
    fill(here, k, v)
    acc = OnlineSoftmax(q)
    for _ in range(comm.size):
        acc.update(here)
        incoming = arena.rent()  # leak: the break on a future block leaves it behind
        comm.exchange(here, incoming)
        if incoming.seq_start > comm.rank:
            break
        arena.surrender(here)
        here = incoming
    arena.surrender(here)
    return acc.out


def ring_backward_overlapped(dout, q, arena: KVArena, comm: RingComm, hops: int) -> torch.Tensor:
    grad = arena.rent(comm.rank)  # clean: surrendered at the end
    stash = None
    if hops > 1:
        stash = arena.rent()  # leak: with two hops the end below does not surrender it
        comm.exchange(grad, stash)
    grad.k.copy_(dout.transpose(-1, -2) @ q)
    if hops > 2:
        grad.k.add_(stash.k)
        arena.surrender(stash)
    dk = grad.k.clone()
    arena.surrender(grad)
    return dk


def striped_forward(q, stripes, arena: KVArena) -> torch.Tensor:
    acc = OnlineSoftmax(q)
    blocks: list[KVBlock] = []
    for i, (k, v) in enumerate(stripes):
        block = arena.rent(i)  # leak: the first block stays in the list when the others are surrendered
        blocks.append(fill(block, k, v))
        acc.update(block)
    for block in blocks[1:]:
        arena.surrender(block)
    return acc.out


def local_block(arena: KVArena, k: torch.Tensor, v: torch.Tensor, rank: int) -> KVBlock:
    return fill(arena.rent(rank), k, v)  # clean: fill() returns the block, the caller owns it


def key_stats(k, v, arena: KVArena, rank: int) -> dict[str, float]:
    block = local_block(arena, k, v, rank)  # leak: only its numbers are returned
    mean, peak = block.k.mean(), block.k.abs().max()
    return {"mean": float(mean), "peak": float(peak), "rank": float(rank)}


def incoming_blocks(arena: KVArena, comm: RingComm, first: KVBlock) -> Iterator[KVBlock]:
    """Yields each received block once; the consumer surrenders what it is given."""
    relay = arena.rent(first.seq_start)  # clean: surrendered in the finally after the last hop
    fill(relay, first.k, first.v)
    try:
        for _ in range(comm.size - 1):
            block = arena.rent()  # clean: near miss, yielded to the consumer, who surrenders it
            comm.exchange(relay, block)
            relay.seq_start = block.seq_start
            fill(relay, block.k, block.v)
            yield block
    finally:
        arena.surrender(relay)


def attend_stream(q, first: KVBlock, arena: KVArena, comm: RingComm) -> torch.Tensor:
    acc = OnlineSoftmax(q)
    acc.update(first)
    for block in incoming_blocks(arena, comm, first):  # clean: each block is surrendered
        if block.seq_start <= comm.rank:
            acc.update(block)
        arena.surrender(block)
    return acc.out


def attend_window(q, first: KVBlock, arena: KVArena, comm: RingComm, window: int) -> torch.Tensor:
    acc = OnlineSoftmax(q)
    acc.update(first)
    for block in incoming_blocks(arena, comm, first):  # leak: blocks outside the window are passed over
        if comm.rank - block.seq_start > window:
            continue
        acc.update(block)
        arena.surrender(block)
    return acc.out
