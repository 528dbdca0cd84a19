"""1F1B pipeline schedule. Activations and gradients travel in recycled communication buffers."""
from __future__ import annotations

import logging
from collections import deque
from typing import Deque, Optional

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class CommBuffers:
    def __init__(self, shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape = shape
        self.dtype = dtype
        self._idle: Deque[torch.Tensor] = deque(torch.empty(shape, dtype=dtype) for _ in range(count))

    def checkout(self) -> torch.Tensor:
        if self._idle:
            return self._idle.popleft()
        logger.warning("communication buffers exhausted, growing")
        return torch.empty(self.shape, dtype=self.dtype)

    def checkin(self, buf: torch.Tensor) -> None:
        self._idle.append(buf)


class PipelineStage:
    def __init__(self, module: torch.nn.Module, bufs: CommBuffers, rank: int, world: int) -> None:
        self.module = module
        self.bufs = bufs
        self.rank = rank
        self.world = world
        self.saved: Deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world - 1

    def recv_forward(self) -> Optional[torch.Tensor]:
        if self.is_first:
            return None
        buf = self.bufs.checkout()  # clean: returned filled
        dist.recv(buf, self.rank - 1)
        return buf

    def recv_backward(self) -> Optional[torch.Tensor]:
        buf = self.bufs.checkout()  # leak: the last stage returns None after the checkout
        if self.is_last:
            return None
        dist.recv(buf, self.rank + 1)
        return buf

    def forward(self, micro: Optional[torch.Tensor]) -> torch.Tensor:
        inp = micro if micro is not None else self.recv_forward()  # clean: saved, and checked in by the backward step
        inp.requires_grad_()
        out = self.module(inp)
        self.saved.append((inp, out))
        if not self.is_last:
            dist.send(out.detach(), self.rank + 1)
        return out

    def backward(self, loss_scale: float) -> None:
        inp, out = self.saved.popleft()
        if self.is_last:
            (out.sum() * loss_scale).backward()
        else:
            grad = self.bufs.checkout()  # clean: checked in after backward
            dist.recv(grad, self.rank + 1)
            out.backward(grad)
            self.bufs.checkin(grad)
        if not self.is_first:
            dist.send(inp.grad, self.rank - 1)
            self.bufs.checkin(inp)

    def forward_only(self, micro: Optional[torch.Tensor]) -> torch.Tensor:
        inp = micro
        if inp is None:
            inp = self.recv_forward()  # leak: evaluation keeps only the output of the module
        with torch.no_grad():
            out = self.module(inp)
        if not self.is_last:
            dist.send(out, self.rank + 1)
        return out

    def eval_step(self, micro: Optional[torch.Tensor]) -> torch.Tensor:
        received = None
        if micro is None:
            received = self.recv_forward()  # clean: near miss, checked in whenever it was received
            micro = received
        with torch.no_grad():
            out = self.module(micro)
        if received is not None:
            self.bufs.checkin(received)
        return out

    def exchange(self, t: torch.Tensor) -> torch.Tensor:
        send_buf = self.bufs.checkout()  # clean: checked in after the wait
        recv_buf = self.bufs.checkout()  # clean: near miss, a clone leaves and the buffer is checked in
        send_buf.copy_(t)
        ops = [dist.P2POp(dist.isend, send_buf, (self.rank + 1) % self.world),
               dist.P2POp(dist.irecv, recv_buf, (self.rank - 1) % self.world)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        res = recv_buf.clone()
        self.bufs.checkin(send_buf)
        self.bufs.checkin(recv_buf)
        return res

    def ring_reduce(self, t: torch.Tensor) -> torch.Tensor:
        acc = self.bufs.checkout()  # leak: from the first hop on acc names a sum
        acc.copy_(t)
        for _ in range(self.world - 1):
            hop = self.bufs.checkout()  # clean: checked in at the end of each hop
            dist.send(acc, (self.rank + 1) % self.world)
            dist.recv(hop, (self.rank - 1) % self.world)
            acc = acc + hop
            self.bufs.checkin(hop)
        return acc

    def ring_max(self, t: torch.Tensor) -> torch.Tensor:
        acc = self.bufs.checkout()  # clean: near miss, out= writes into the lease, which is checked in
        acc.copy_(t)
        for _ in range(self.world - 1):
            hop = self.bufs.checkout()  # leak: a hop that brings nothing new breaks out without the checkin
            dist.recv(hop, (self.rank - 1) % self.world)
            if torch.equal(hop, acc):
                break
            torch.maximum(acc, hop, out=acc)
            self.bufs.checkin(hop)
        res = acc.clone()
        self.bufs.checkin(acc)
        return res

    def abort(self) -> None:
        while self.saved:
            inp, _ = self.saved.popleft()
            if not self.is_first:
                self.bufs.checkin(inp)
