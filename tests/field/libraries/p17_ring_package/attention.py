"""Ring attention module."""
from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor, nn

from .buffers import BufferBank, PairBuffer
from .exchange import RingExchange


class RingAttention(nn.Module):
    def __init__(self, exchange: RingExchange, heads: int, keep_pair: bool = False) -> None:
        super().__init__()
        self.exchange = exchange
        self.heads = heads
        self.keep_pair = keep_pair
        self._pair: Optional[PairBuffer] = None

    def _fold(self, acc: Tensor, lse: Tensor, q: Tensor, kv: Tensor) -> Tuple[Tensor, Tensor]:
        k, v = kv.view(2, *q.shape).unbind(0)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        new_lse = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
        acc.mul_((lse - new_lse).exp()).add_((scores - new_lse).exp() @ v)
        return acc, new_lse

    @torch.no_grad()
    def forward(self, q: Tensor, kv: Tensor) -> Tensor:
        bank = self.exchange.bank
        lse = q.new_full((*q.shape[:-1], 1), float("-inf"))
        flat = bank.lend(q.numel(), q.dtype)  # clean: near miss, _fold gives back the same accumulator and both exits reclaim it
        if flat is None:
            raise MemoryError("no room for the accumulator")
        acc = flat.view(q.shape).zero_()
        pair = self.exchange.open(kv)  # clean: near miss, None falls back to local attention and a real pair is closed
        if pair is None:
            acc, lse = self._fold(acc, lse, q, kv)
            local = acc.clone()
            bank.reclaim(acc)
            return local
        current = pair.front
        for step in range(self.exchange.world):
            acc, lse = self._fold(acc, lse, q, current)
            if step + 1 < self.exchange.world:
                current = self.exchange.turn(pair)
        out = acc.clone()
        pair.close()
        bank.reclaim(acc)
        return out

    def warm(self, kv: Tensor) -> bool:
        if self._pair is not None:
            self._pair.close()
        self._pair = self.exchange.open(kv)  # clean: near miss, the former pair is closed first and release closes the last
        return self._pair is not None

    def measure(self, kv: Tensor, rounds: int) -> int:
        pair = self.exchange.open_zeroed(kv.numel(), kv.dtype)  # leak: closed only when keep_pair is off, and with it on nothing keeps the pair
        if pair is None:
            return 0
        for _ in range(rounds):
            self.exchange.turn(pair)
        if not self.keep_pair:
            pair.close()
        return rounds * kv.numel()

    def release(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()
