"""Ring collectives over a pool of staging tensors."""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch


class StagingPool:
    """Reuses flat communication tensors keyed by (numel, dtype)."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._idle: Dict[Tuple[int, torch.dtype], List[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()
        self.outstanding = 0

    def take(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self._lock:
            self.outstanding += 1
            idle = self._idle[(numel, dtype)]
            if idle:
                return idle.pop()  # clean: returned to the caller
        return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self.outstanding -= 1
            self._idle[(tensor.numel(), tensor.dtype)].append(tensor)


@dataclass
class RingLink:
    """Point to point link to the two neighbours."""

    rank: int
    world: int

    def exchange(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        ops = [
            torch.distributed.P2POp(torch.distributed.isend, send, (self.rank + 1) % self.world),
            torch.distributed.P2POp(torch.distributed.irecv, recv, (self.rank - 1) % self.world),
        ]
        for work in torch.distributed.batch_isend_irecv(ops):
            work.wait()


class RingReducer:
    def __init__(self, pool: StagingPool, link: RingLink) -> None:
        self.pool = pool
        self.link = link
        self.residual: Optional[torch.Tensor] = None

    def reduce(self, shard: torch.Tensor) -> torch.Tensor:
        """Sum `shard` over the ring; the result is a pooled tensor the caller gives back."""
        total = self.pool.take(shard.numel(), shard.dtype)  # clean: returned to the caller
        total.copy_(shard.view(-1))
        send = self.pool.take(shard.numel(), shard.dtype)  # clean: near miss, swaps with recv, both given back
        recv = self.pool.take(shard.numel(), shard.dtype)  # clean: near miss, swaps with send, both given back
        send.copy_(total)
        for _ in range(self.link.world - 1):
            self.link.exchange(send, recv)
            total.add_(recv)
            send, recv = recv, send
        self.pool.give(send)
        self.pool.give(recv)
        return total

    def average_(self, shard: torch.Tensor) -> None:
        total = self.reduce(shard)  # clean: near miss, divided in place before it goes back
        total.div_(self.link.world)
        shard.copy_(total.view_as(shard))
        self.pool.give(total)

    def mean(self, shard: torch.Tensor) -> torch.Tensor:
        out = self.reduce(shard)  # leak: rebinding to the quotient loses the pooled tensor
        if self.link.world > 1:
            out = out / self.link.world
        return out.view_as(shard)

    def norm(self, shard: torch.Tensor) -> float:
        squares = self.reduce(shard.pow(2))  # clean: given back after the sum is read
        value = squares.sum().sqrt().item()
        self.pool.give(squares)
        return value

    def norms(self, shards: List[torch.Tensor]) -> List[float]:
        return [self.reduce(shard).norm().item() for shard in shards]  # leak: the numbers are kept, the tensors dropped

    def sync_parameters(self, params: List[torch.nn.Parameter]) -> None:
        for param in params:
            if not param.requires_grad or param.grad is None:
                continue
            param.grad.copy_(self.reduce(param.grad).view_as(param.grad))  # leak: copied out of and dropped

    def compress(self, grad: torch.Tensor) -> torch.Tensor:
        """Add the error feedback term; keeps the new residual on self."""
        fresh = self.pool.take(grad.numel(), grad.dtype)  # clean: near miss, old residual given back before the store
        fresh.copy_(grad.view(-1))
        if self.residual is not None:
            fresh.add_(self.residual)
            self.pool.give(self.residual)
        quantised = fresh.sign() * fresh.abs().mean()
        fresh.sub_(quantised)
        self.residual = fresh
        return quantised

    def reset(self) -> None:
        if self.residual is not None:
            self.pool.give(self.residual)
            self.residual = None


class RingAttention:
    """Rotates key/value blocks around the ring, merging partial softmax results."""

    def __init__(self, pool: StagingPool, link: RingLink) -> None:
        self.pool = pool
        self.link = link

    def _rotate(self, block: torch.Tensor) -> torch.Tensor:
        incoming = self.pool.take(block.numel(), block.dtype)  # clean: returned to the caller
        self.link.exchange(block, incoming)
        return incoming

    def forward(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        acc = torch.zeros_like(q)
        block = kv
        for step in range(self.link.world):
            acc = acc + torch.softmax(q @ block.view_as(kv).T, dim=-1) @ block.view_as(kv)
            if step + 1 < self.link.world:
                block = self._rotate(block)  # leak: every hop overwrites the block of the last hop
        return acc

    def forward_causal(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        acc = torch.zeros_like(q)
        block = kv
        for step in range(self.link.world):
            if step <= self.link.rank:
                acc = acc + torch.softmax(q @ block.view_as(kv).T, dim=-1) @ block.view_as(kv)
            if step + 1 == self.link.world:
                break
            following = self._rotate(block)  # clean: near miss, each hop's block goes back before the next or at the end
            if block is not kv:
                self.pool.give(block)
            block = following
        if block is not kv:
            self.pool.give(block)
        return acc
