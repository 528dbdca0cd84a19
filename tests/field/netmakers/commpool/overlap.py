"""Tensor-parallel layers which overlap the gather of one chunk with the matmul of another."""
from __future__ import annotations

import torch
import torch.distributed as dist

from .scoped import GroupBuffers


class ColumnParallelOverlap:
    def __init__(self, bufs: GroupBuffers, weight: torch.Tensor, group) -> None:
        self.bufs = bufs
        self.weight = weight
        self.group = group

    def forward(self, x: torch.Tensor, chunks: int) -> torch.Tensor | None:
        shape = (self.bufs.world * x.shape[0] // chunks, x.shape[1])
        pair = self.bufs.borrow_pair(torch.Size(shape).numel() * x.dtype.itemsize)  # leak: both are lost when the input does not split evenly
        if pair is None:
            return None
        if x.shape[0] % chunks:
            return None
        slots = [b.as_type(shape, x.dtype) for b in pair]
        works: list = [None, None]
        outs = []
        for i, part in enumerate(x.chunk(chunks)):
            works[i % 2] = dist.all_gather_into_tensor(slots[i % 2], part, group=self.group, async_op=True)
            if i:
                works[(i - 1) % 2].wait()
                outs.append(slots[(i - 1) % 2] @ self.weight)
        works[(chunks - 1) % 2].wait()
        outs.append(slots[(chunks - 1) % 2] @ self.weight)
        for b in pair:
            self.bufs.repay(b)
        return torch.cat(outs)

    def forward_plain(self, x: torch.Tensor) -> torch.Tensor:
        shape = (self.bufs.world * x.shape[0], x.shape[1])
        with self.bufs.view(shape, x.dtype) as full:  # clean: near miss, context manager, also for the fallback return
            if full is None:
                parts = [torch.empty_like(x) for _ in range(self.bufs.world)]
                dist.all_gather(parts, x, group=self.group)
                return torch.cat(parts) @ self.weight
            dist.all_gather_into_tensor(full, x, group=self.group)
            return full @ self.weight


class GradScatter:
    def __init__(self, bufs: GroupBuffers, group) -> None:
        self.bufs = bufs
        self.group = group
        self.in_flight: list[tuple] = []

    def start(self, grad: torch.Tensor) -> bool:
        buf = self.bufs.borrow(grad.nbytes)  # clean: kept in in_flight, repaid by finish
        if buf is None:
            return False
        src = buf.as_type(tuple(grad.shape), grad.dtype)
        src.copy_(grad)
        out = grad.new_empty(grad.shape[0] // self.bufs.world, *grad.shape[1:])
        work = dist.reduce_scatter_tensor(out, src, group=self.group, async_op=True)
        self.in_flight.append((work, buf, out))
        return True

    def finish(self) -> list[torch.Tensor]:
        outs = []
        for work, buf, out in self.in_flight:
            work.wait()
            self.bufs.repay(buf)
            outs.append(out)
        self.in_flight.clear()
        return outs

    def norm(self, grad: torch.Tensor) -> float:
        buf = self.bufs.borrow(grad.numel() * 4)  # leak: repaid only where the norm is finite
        if buf is None:
            return grad.float().norm().item()
        wide = buf.as_type(tuple(grad.shape), torch.float32)
        wide.copy_(grad)
        n = wide.norm()
        if not torch.isfinite(n):
            return float("inf")
        self.bufs.repay(buf)
        return n.item()

    def workspace(self, nbytes: int) -> torch.Tensor | None:
        ws = self.bufs.named("workspace", nbytes)  # clean: near miss, owned by the table of names, only viewed here
        return None if ws is None else ws.mem[:nbytes]

    def widen(self, grad: torch.Tensor) -> torch.Tensor | None:
        buf = self.bufs.borrow(grad.numel() * 4)  # leak: a clone is returned and the buffer is dropped
        if buf is None:
            return None
        return buf.as_type(tuple(grad.shape), torch.float32).copy_(grad).clone()
