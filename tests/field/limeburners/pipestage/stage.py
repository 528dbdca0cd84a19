"""One pipeline stage running the 1F1B schedule."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

import torch

from .p2p import Channel, P2PBuffer, P2PPool


@dataclass
class MicroBatch:
    index: int
    inp: Optional[P2PBuffer]
    out: Optional[P2PBuffer] = None
    aux: Optional[P2PBuffer] = None


class Stage:
    def __init__(self, fn: Callable, pool: P2PPool, prev: Optional[Channel], nxt: Optional[Channel]):
        self.fn = fn
        self.pool = pool
        self.prev = prev
        self.nxt = nxt
        self.pending: Dict[int, MicroBatch] = {}
        self.losses: List[float] = []

    @property
    def is_first(self) -> bool:
        return self.prev is None

    @property
    def is_last(self) -> bool:
        return self.nxt is None

    def forward(self, index: int, local: Optional[torch.Tensor]) -> bool:
        if self.is_first:
            inp = self.pool.draw()  # clean: in the micro-batch, dropped by _retire, or None
        else:
            inp = self.prev.recv_expected(index)  # clean: in the micro-batch, dropped by _retire, or None
        if inp is None:
            return False
        if self.is_first:
            inp.data.copy_(local)
        out = self.pool.draw()  # clean: in the micro-batch, dropped by _retire, or None
        if out is None:
            inp.unref()
            return False
        out.data.copy_(self.fn(inp.data))
        self.pending[index] = MicroBatch(index, inp, out)
        if not self.is_last:
            self.nxt.send(out)
        else:
            self.losses.append(float(out.data.mean()))
        return True

    def add_aux(self, index: int) -> bool:
        """Router losses of this micro-batch; sent backwards together with the gradient."""
        mb = self.pending[index]
        if mb.aux is None:
            mb.aux = self.pool.draw()  # leak: _retire drops inp and out, and aux is never dropped
        return mb.aux is not None

    def _retire(self, mb: MicroBatch) -> None:
        for buf in (mb.inp, mb.out):
            if buf is not None:
                buf.unref()
        mb.inp = mb.out = mb.aux = None

    def backward(self, index: int) -> bool:
        grad = None
        if not self.is_last:
            grad = self.nxt.recv_expected(index)  # clean: near miss, is_last has none, dropped below
            if grad is None:
                return False
        mb = self.pending.pop(index)
        upstream = torch.ones_like(mb.out.data) if self.is_last else grad.data
        gin = torch.autograd.grad(self.fn(mb.inp.data.requires_grad_()), mb.inp.data, upstream)[0]
        if grad is not None:
            grad.unref()
        if not self.is_first:
            back = self.pool.draw()  # clean: send_and_drop ends the use, or None
            if back is not None:
                back.data.copy_(gin)
                self.prev.send_and_drop(back)
        self._retire(mb)
        return True

    def evaluate(self, count: int) -> List[float]:
        """Forward only: inputs are received, outputs are passed on."""
        scores: List[float] = []
        for index in range(count):
            inp = self.prev.recv_expected(index)  # leak: dropped on the last stage only
            if inp is None:
                break
            y = self.fn(inp.data)
            if self.is_last:
                scores.append(float(y.mean()))
                inp.unref()
                continue
            out = self.pool.draw()  # clean: send_and_drop ends the use, or None
            if out is None:
                break
            out.data.copy_(y)
            self.nxt.send_and_drop(out)
        return scores

    def flush_gradients(self) -> None:
        for ch in (self.prev, self.nxt):
            if ch is not None:
                ch.flush(block=True)

    def abort(self) -> None:
        for mb in self.pending.values():
            self._retire(mb)
        self.pending.clear()
        for ch in (self.prev, self.nxt):
            if ch is not None:
                ch.close()
