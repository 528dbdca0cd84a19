"""Ring attention: keys and values travel from rank to rank, queries stay."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longdoc.memory_pool import TensorMemoryPool, get_memory_pool


class RingAttention(nn.Module):
    """Exact attention over a sequence that is spread over the ranks of a process group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        enable_memory_pool: bool = True,
        pool: TensorMemoryPool | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.world = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.pool = pool or (get_memory_pool() if enable_memory_pool else TensorMemoryPool())
        self._inbox: Tensor | None = None
        self._outbox: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._inbox = self.pool.allocate((2, *k.shape), k.dtype)
        if self._outbox is None:
            self._outbox = self.pool.allocate((2, *k.shape), k.dtype)
        out = torch.zeros_like(q)
        lse = torch.full((*q.shape[:-1], 1), float("-inf"), dtype=q.dtype)
        for turn in range(self.world):
            part, part_lse = self._attend(q, k, v)
            out, lse = merge(out, lse, part, part_lse)
            if turn < self.world - 1:
                k, v = self._exchange(k, v)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        b, n, h, d = q.shape
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with self.pool.lease((b, h, n, k.shape[2]), q.dtype) as scores:
            torch.matmul(q, k.transpose(-1, -2), out=scores)
            scores.mul_(d**-0.5)
            lse = scores.logsumexp(-1, keepdim=True)
            part = scores.sub_(lse).exp_() @ v
        return part.transpose(1, 2), lse.transpose(1, 2)

    def _exchange(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Send our part to the right, receive the left neighbour's."""
        assert self._inbox is not None and self._outbox is not None
        self._outbox[0].copy_(k)
        self._outbox[1].copy_(v)
        right, left = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        operations = [
            dist.P2POp(dist.isend, self._outbox, right, self.group),
            dist.P2POp(dist.irecv, self._inbox, left, self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        received = self._inbox.clone()
        return received[0], received[1]

    def close(self) -> None:
        """Give back the communication buffers."""
        if self._inbox is not None:
            self.pool.deallocate(self._inbox)
            self._inbox = None
        if self._outbox is not None:
            self.pool.deallocate(self._outbox)
            self._outbox = None


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two attention results over disjoint keys as one, without ever leaving the log domain."""
    new = torch.logaddexp(lse, part_lse)
    return out * (lse - new).exp() + part * (part_lse - new).exp(), new
