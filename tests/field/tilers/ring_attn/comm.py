"""Point-to-point ring exchange."""
from __future__ import annotations

from typing import Any, List

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = dist = None

from .buffers import CommBufferPool, Tensor


class RingComm:
    def __init__(self, pool: CommBufferPool, rank: int, world_size: int, group: Any = None) -> None:
        self.pool = pool
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self.send_rank = (rank + 1) % world_size
        self.recv_rank = (rank - 1) % world_size
        self._ops: List[Any] = []
        self._reqs: List[Any] = []
        self._staged: List[Tensor] = []

    def send_recv(self, to_send: Tensor) -> Tensor:
        recv = self.pool.acquire()  # clean: returned, the caller owns what it received
        if dist is not None:
            self._ops.append(dist.P2POp(dist.isend, to_send, self.send_rank, group=self.group))
            self._ops.append(dist.P2POp(dist.irecv, recv, self.recv_rank, group=self.group))
        return recv

    def stage(self, x: Tensor) -> Tensor:
        """Contiguous copy of ``x`` that lives until the next :meth:`wait`."""
        buf = self.pool.acquire()  # clean: kept in _staged, wait() releases it
        if torch is not None:
            buf.copy_(x)
        self._staged.append(buf)
        return buf

    def commit(self) -> None:
        if self._ops:
            self._reqs = dist.batch_isend_irecv(self._ops)

    def wait(self) -> None:
        for req in self._reqs:
            req.wait()
        self._reqs = []
        self._ops = []
        for buf in self._staged:
            self.pool.release(buf)
        self._staged.clear()

    def broadcast_mask(self, mask: Tensor, src: int) -> Tensor:
        buf = self.pool.acquire()  # leak: single-rank group returns before the release
        if self.world_size == 1:
            return mask
        if self.rank == src:
            buf.copy_(mask)
        dist.broadcast(buf, src, group=self.group)
        out = buf.to(torch.bool)
        self.pool.release(buf)
        return out
