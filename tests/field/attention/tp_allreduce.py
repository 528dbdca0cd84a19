"""Tensor-parallel linears with registered symmetric buffers."""
from __future__ import annotations

import logging
from typing import Dict, Generic, List, Optional, TypeVar

import torch
import torch.distributed as dist
from torch import nn

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Pool(Generic[T]):
    """Minimal typed pool."""

    def __init__(self, items: List[T]) -> None:
        self._items = list(items)

    def draw(self) -> T:
        return self._items.pop()

    def replace(self, item: T) -> None:
        self._items.append(item)

    def __bool__(self) -> bool:
        return bool(self._items)


class SymmBuffers:
    """Wrapper around a Pool that knows shapes."""

    def __init__(self, n: int, numel: int) -> None:
        self._pool: Pool[torch.Tensor] = Pool([torch.empty(numel) for _ in range(n)])

    def get(self, numel: int) -> Optional[torch.Tensor]:
        if not self._pool:
            return None
        buf = self._pool.draw()  # clean: near miss, put back when too small, else handed out whole
        if buf.numel() < numel:
            self._pool.replace(buf)
            return None
        return buf

    def get_unchecked(self, numel: int) -> Optional[torch.Tensor]:
        buf = self._pool.draw()  # leak: the too small buffer is drawn and not replaced
        if buf.numel() < numel:
            logger.warning("symmetric buffer too small")
            return None
        return buf

    def put(self, buf: torch.Tensor) -> None:
        self._pool.replace(buf)


class Communicator:
    """Wrapper of the wrapper: all-reduce through a buffer."""

    def __init__(self, bufs: SymmBuffers, group: Optional[dist.ProcessGroup] = None) -> None:
        self.bufs = bufs
        self.group = group
        self.disabled = False

    def stage_in(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        buf = self.bufs.get(x.numel())  # clean: handed to the caller, None when there is none
        if buf is None:
            return None
        buf[: x.numel()].copy_(x.flatten())
        return buf

    def stage_out(self, buf: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = buf[: x.numel()].clone().view_as(x)
        self.bufs.put(buf)
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.stage_in(x)  # clean: stage_out puts it back
        if buf is None:
            dist.all_reduce(x, group=self.group)
            return x
        dist.all_reduce(buf, group=self.group)
        return self.stage_out(buf, x)

    def all_reduce_maybe(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.stage_in(x)  # leak: when disabled the staged buffer is ignored
        if self.disabled or buf is None:
            dist.all_reduce(x, group=self.group)
            return x
        dist.all_reduce(buf, group=self.group)
        return self.stage_out(buf, x)

    def all_reduce_guarded(self, x: torch.Tensor) -> torch.Tensor:
        buf = None
        if not self.disabled:
            buf = self.stage_in(x)  # clean: near miss, the result is tested and staged out
        if buf is not None:
            dist.all_reduce(buf, group=self.group)
            return self.stage_out(buf, x)
        dist.all_reduce(x, group=self.group)
        return x

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.stage_in(x)  # leak: the division makes a fresh tensor and stage_out puts that one back
        if buf is None:
            return x
        dist.all_reduce(buf, group=self.group)
        buf = buf / dist.get_world_size(self.group)
        return self.stage_out(buf, x)

    def mean_(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.stage_in(x)  # clean: near miss, divided in place
        if buf is None:
            return x
        dist.all_reduce(buf, group=self.group)
        buf.div_(dist.get_world_size(self.group))
        return self.stage_out(buf, x)

    def max_abs(self, x: torch.Tensor) -> float:
        buf = self.bufs.get(x.numel())  # leak: read as a number and never put back
        if buf is None:
            return float(x.abs().max())
        view = buf[: x.numel()].copy_(x.flatten()).abs_()
        dist.all_reduce(view, op=dist.ReduceOp.MAX, group=self.group)
        return float(view.max())


class RowParallelLinear(nn.Module):
    def __init__(self, in_f: int, out_f: int, comm: Communicator) -> None:
        super().__init__()
        self.lin = nn.Linear(in_f, out_f, bias=False)
        self.comm = comm
        self._kept: Dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(self.lin(x))

    def forward_async(self, step: int, x: torch.Tensor) -> bool:
        if step in self._kept:
            return False
        buf = self.comm.stage_in(self.lin(x))  # clean: wait takes it out of the table and stages it out
        if buf is None:
            return False
        self._kept[step] = buf
        return True

    def wait(self, step: int, like: torch.Tensor) -> torch.Tensor:
        buf = self._kept.pop(step)
        dist.all_reduce(buf, group=self.comm.group)
        return self.comm.stage_out(buf, like)

    def warm(self, shapes: List[int]) -> int:
        ok = 0
        for n in shapes:
            if self.comm.stage_in(torch.zeros(n)) is not None:  # leak: the staged buffer is only tested
                ok += 1
        return ok

    def calibrate(self, xs: List[torch.Tensor]) -> List[float]:
        peaks = []
        for x in xs:
            buf = self.comm.bufs.get_unchecked(x.numel())  # clean: put back in the same round
            if buf is None:
                continue
            peaks.append(float(buf[: x.numel()].copy_(x.flatten()).max()))
            self.comm.bufs.put(buf)
        return peaks
