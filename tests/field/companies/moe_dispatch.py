"""Expert-parallel dispatch / combine on top of leased exchange buffers."""
from __future__ import annotations

import dataclasses
from typing import NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    top_k: int
    hidden: int
    capacity: int
    debug: bool = False


class ExchangeBuffers:
    def __init__(self, cfg: MoEConfig, n: int):
        self.store = torch.empty(n, cfg.num_experts * cfg.capacity, cfg.hidden)
        self.mask = (1 << n) - 1

    def obtain_buffer(self) -> tuple[int, torch.Tensor]:
        if not self.mask:
            raise RuntimeError("exchange buffers exhausted")
        i = (self.mask & -self.mask).bit_length() - 1
        self.mask &= ~(1 << i)
        return i, self.store[i]

    def recycle_buffer(self, i: int) -> None:
        self.mask |= 1 << i


class DispatchHandle(NamedTuple):
    send: int
    recv: int
    tokens: torch.Tensor
    counts: torch.Tensor


class Dispatcher:
    def __init__(self, cfg: MoEConfig, bufs: ExchangeBuffers, group=None):
        self.cfg = cfg
        self.bufs = bufs
        self.group = group
        self._handles: list[DispatchHandle] = []

    def dispatch(self, x: torch.Tensor, counts: torch.Tensor) -> DispatchHandle:
        si, send = self.bufs.obtain_buffer()  # clean: in the handle, combine() recycles both
        ri, recv = self.bufs.obtain_buffer()  # clean: in the handle, combine() recycles both
        send[: x.shape[0]].copy_(x)
        dist.all_to_all_single(recv, send, group=self.group)
        return DispatchHandle(si, ri, recv, counts)

    def combine(self, h: DispatchHandle, weights: torch.Tensor) -> torch.Tensor:
        out = (h.tokens[: weights.shape[0]] * weights[:, None]).clone()
        self.bufs.recycle_buffer(h.recv)
        self.bufs.recycle_buffer(h.send)
        return out

    def forward(self, x: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        h = self.dispatch(x, counts)  # clean: combined on the next line
        return self.combine(h, weights)

    def forward_dropless(self, x: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        h = self.dispatch(x, counts)  # leak: with no tokens for this rank the handle is not combined
        if int(counts.sum()) == 0:
            return x.new_zeros(x.shape)
        return self.combine(h, weights)

    def enqueue(self, x: torch.Tensor, counts: torch.Tensor) -> None:
        self._handles.append(self.dispatch(x, counts))  # clean: flush() combines each

    def flush(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outs = [self.combine(h, w) for h, w in zip(self._handles, weights, strict=True)]
        self._handles.clear()
        return outs

    def gather_stats(self, hist: torch.Tensor) -> torch.Tensor:
        i, buf = self.bufs.obtain_buffer()  # leak: in debug mode the early return keeps the buffer
        buf.zero_()
        buf[0, : hist.numel()] = hist
        dist.all_reduce(buf[0], group=self.group)
        out = buf[0, : hist.numel()].clone()
        if self.cfg.debug:
            print("expert histogram", out.tolist())
            return out
        self.bufs.recycle_buffer(i)
        return out

    def permute(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        i, buf = self.bufs.obtain_buffer()  # clean: near miss, rebinding the view does not matter, the index goes back
        buf = buf[: x.shape[0]]
        torch.index_select(x, 0, order, out=buf)
        buf = buf * 1.0
        self.bufs.recycle_buffer(i)
        return buf

    def swap_experts(self, a: torch.Tensor, b: torch.Tensor) -> None:
        i, tmp = self.bufs.obtain_buffer()  # leak: the index is overwritten by the loop variable
        tmp[: a.shape[0]].copy_(a)
        for i in range(a.shape[0]):
            a[i].copy_(b[i])
        b.copy_(tmp[: b.shape[0]])
        self.bufs.recycle_buffer(i)


class DualDispatcher(Dispatcher):
    """Overlaps two micro batches."""

    def __init__(self, cfg: MoEConfig, bufs: ExchangeBuffers, group=None):
        super().__init__(cfg, bufs, group)
        self.prev: Optional[DispatchHandle] = None

    def push(self, x: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> Optional[torch.Tensor]:
        out = None
        if self.prev is not None:
            out = self.combine(self.prev, weights)
        self.prev = self.dispatch(x, counts)  # clean: near miss, the previous was combined first and finish() does the last
        return out

    def finish(self, weights: torch.Tensor) -> Optional[torch.Tensor]:
        if self.prev is None:
            return None
        out = self.combine(self.prev, weights)
        self.prev = None
        return out

    def both(self, xa, xb, counts, weights) -> torch.Tensor:
        ha = self.dispatch(xa, counts)  # clean: combined before the second
        ya = self.combine(ha, weights)
        hb = self.dispatch(xb, counts)  # leak: ha is combined again in its place
        yb = self.combine(ha, weights)
        return ya + yb
