"""All-to-all between a split of the sequence and a split of the heads."""
from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import List, Optional

import torch
import torch.distributed as dist

from .buffers import BufferSource


@dataclass
class Pending:
    """An all-to-all under way, with both of its buffers."""

    send: torch.Tensor
    recv: torch.Tensor
    work: Optional[dist.Work]
    shape: tuple

    def settle(self, source: BufferSource) -> torch.Tensor:
        """Waits and gives the send buffer back; the receive buffer is now the caller's."""
        if self.work is not None:
            self.work.wait()
        source.unrent(self.send)
        return self.recv.view(self.shape)

    def discard(self, source: BufferSource) -> None:
        if self.work is not None:
            self.work.wait()
        source.unrent(self.send)
        source.unrent(self.recv)


class Exchange(abc.ABC):
    def __init__(self, source: BufferSource, group: dist.ProcessGroup):
        self.source = source
        self.group = group
        self.world = dist.get_world_size(group)

    @abc.abstractmethod
    def layout(self, x: torch.Tensor) -> torch.Tensor: ...

    @abc.abstractmethod
    def out_shape(self, x: torch.Tensor) -> tuple: ...

    def begin(self, x: torch.Tensor) -> Pending:
        send = self.source.rent(x.numel(), x.dtype)  # clean: moved into the Pending that is returned
        send.copy_(self.layout(x).reshape(-1))
        recv = self.source.rent(x.numel(), x.dtype)  # clean: moved into the Pending that is returned
        work = dist.all_to_all_single(recv, send, group=self.group, async_op=True)
        return Pending(send, recv, work, self.out_shape(x))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Result in a rented buffer; the caller unrents its base."""
        return self.begin(x).settle(self.source)  # clean: settle unrents send, recv goes to the caller

    def run_copy(self, x: torch.Tensor) -> torch.Tensor:
        pending = self.begin(x)  # clean: settled, and the receive buffer unrented after the clone
        view = pending.settle(self.source)
        out = view.clone()
        self.source.unrent(pending.recv)
        return out

    def norm_after(self, x: torch.Tensor) -> float:
        pending = self.begin(x)  # leak: settle gives back the send buffer, the receive buffer is dropped
        return float(pending.settle(self.source).float().norm())


class ScatterHeads(Exchange):
    """[seq/P, heads, dim] to [seq, heads/P, dim]."""

    def layout(self, x: torch.Tensor) -> torch.Tensor:
        s, h, d = x.shape
        return x.view(s, self.world, h // self.world, d).transpose(0, 1)

    def out_shape(self, x: torch.Tensor) -> tuple:
        s, h, d = x.shape
        return (s * self.world, h // self.world, d)


class GatherHeads(Exchange):
    """[seq, heads/P, dim] to [seq/P, heads, dim], the heads of a rank being contiguous."""

    def layout(self, x: torch.Tensor) -> torch.Tensor:
        s, h, d = x.shape
        return x.view(self.world, s // self.world, h, d)

    def out_shape(self, x: torch.Tensor) -> tuple:
        s, h, d = x.shape
        return (self.world, s // self.world, h, d)


def drain(pendings: List[Pending], source: BufferSource) -> None:
    while pendings:
        pendings.pop().discard(source)
