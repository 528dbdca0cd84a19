from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .buffers import ActivationPool, TagSpace

logger = logging.getLogger(__name__)


@dataclass
class InFlight:
    micro: int
    inp: torch.Tensor
    out: torch.Tensor
    tag: int | None = None
    work: dist.Work | None = None


class PipelineStage:
    def __init__(self, module: torch.nn.Module, pool: ActivationPool, tags: TagSpace, prev: int | None, nxt: int | None) -> None:
        self.module = module
        self.pool = pool
        self.tags = tags
        self.prev = prev
        self.nxt = nxt
        self.live: dict[int, InFlight] = {}
        self.grad_buf: torch.Tensor | None = None

    def _receive(self, micro: int) -> torch.Tensor | None:
        buf = self.pool.checkout()  # clean: None goes up as it is, the filled buffer is the caller's
        if buf is None:
            return None
        dist.recv(buf, self.prev, tag=micro)
        return buf

    def forward(self, micro: int, data: torch.Tensor | None) -> bool:
        if self.prev is None:
            inp = self.pool.checkout()  # clean: near miss, in live until backward() or reset()
            if inp is None:
                return False
            inp.copy_(data)
        else:
            inp = self._receive(micro)  # clean: near miss, in live until backward() or reset()
            if inp is None:
                return False
        out = self.module(inp.detach().requires_grad_())
        item = InFlight(micro, inp, out)
        if self.nxt is not None:
            item.tag = self.tags.reserve()  # leak: backward() gives back the input and leaves the tag reserved
            if item.tag is not None:
                item.work = dist.isend(out.detach(), self.nxt, tag=item.tag)
            else:
                dist.send(out.detach(), self.nxt, tag=micro)
        self.live[micro] = item
        return True

    def backward(self, micro: int) -> None:
        item = self.live.pop(micro)
        if item.work is not None:
            item.work.wait()
        if self.grad_buf is None:
            self.grad_buf = self.pool.checkout()  # clean: near miss, taken once and checked in by reset()
        if self.nxt is not None and self.grad_buf is not None:
            dist.recv(self.grad_buf, self.nxt)
            item.out.backward(self.grad_buf)
        else:
            item.out.sum().backward()
        self.pool.checkin(item.inp)

    def evaluate(self, micro: int) -> torch.Tensor | None:
        inp = self._receive(micro)  # leak: the module's result is returned and the received buffer dropped
        if inp is None:
            return None
        with torch.no_grad():
            return self.module(inp).clone()

    def probe_bandwidth(self, rounds: int) -> int:
        ok = 0
        with self.pool.temporary(self.nxt is not None) as buf:  # clean: the context manager checks it in
            for _ in range(rounds):
                if buf is None:
                    break
                dist.send(buf, self.nxt, tag=0)
                ok += 1
        return ok

    def reset(self) -> None:
        for item in self.live.values():
            if item.work is not None:
                item.work.wait()
            self.pool.checkin(item.inp)
            if item.tag is not None:
                self.tags.unreserve(item.tag)
        self.live.clear()
        if self.grad_buf is not None:
            self.pool.checkin(self.grad_buf)
            self.grad_buf = None
