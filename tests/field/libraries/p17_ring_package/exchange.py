"""Neighbour exchange around the ring."""
from __future__ import annotations

from typing import List, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .buffers import BufferBank, GrowingBuffer, PairBuffer


class RingExchange:
    def __init__(self, bank: BufferBank, group=None) -> None:
        self.bank = bank
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._tmp = GrowingBuffer(bank)

    def open(self, kv: Tensor) -> Optional[PairBuffer]:
        pair = PairBuffer(self.bank, kv.numel(), kv.dtype)  # clean: near miss, closed when incomplete and otherwise handed to the caller
        if not pair.complete:
            pair.close()
            return None
        pair.front.copy_(kv.reshape(-1))
        return pair

    def open_zeroed(self, numel: int, dtype: torch.dtype) -> Optional[PairBuffer]:
        pair = PairBuffer(self.bank, numel, dtype)  # leak: an incomplete pair is dropped together with its front buffer
        if not pair.complete:
            return None
        pair.front.zero_()
        pair.back.zero_()
        return pair

    def turn(self, pair: PairBuffer) -> Tensor:
        ops = [
            dist.P2POp(dist.isend, pair.front, (self.rank + 1) % self.world, self.group),
            dist.P2POp(dist.irecv, pair.back, (self.rank - 1) % self.world, self.group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        pair.flip()
        return pair.front

    def broadcast_scale(self, scale: Tensor) -> float:
        buf = self.bank.lend(scale.numel(), scale.dtype)  # clean: near miss, float copies the value out before the buffer is reclaimed
        if buf is None:
            return float(scale.max())
        buf.copy_(scale.reshape(-1))
        dist.broadcast(buf, 0, group=self.group)
        top = float(buf.max())
        self.bank.reclaim(buf)
        return top

    def sum_over_ring(self, t: Tensor) -> Tensor:
        buf = self.bank.lend(t.numel(), t.dtype)  # leak: the mean rebinds the name and the pooled buffer is lost
        if buf is None:
            out = t.clone()
            dist.all_reduce(out, group=self.group)
            return out / self.world
        buf.copy_(t.reshape(-1))
        dist.all_reduce(buf, group=self.group)
        buf = buf / self.world
        return buf.view_as(t)

    def close(self) -> None:
        self._tmp.close()
