"""Activation exchange between pipeline stages (1F1B)."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Deque, List, Optional, Tuple

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class ActivationPool:
    def __init__(self, shape: Tuple[int, ...], capacity: int) -> None:
        self.shape = shape
        self._free: Deque[torch.Tensor] = deque(torch.empty(shape) for _ in range(capacity))

    def __len__(self) -> int:
        return len(self._free)

    def get(self) -> torch.Tensor:
        if not self._free:
            self._free.append(torch.empty(self.shape))
        return self._free.popleft()

    def put(self, t: torch.Tensor) -> None:
        self._free.append(t)


@dataclass
class MicroBatch:
    index: int
    inputs: Optional[torch.Tensor] = None
    outputs: Optional[torch.Tensor] = None


class PipelineStage:
    def __init__(self, module: torch.nn.Module, pool: ActivationPool, rank: int, world: int) -> None:
        self.module = module
        self.pool = pool
        self.rank = rank
        self.world = world
        self.stash: Deque[MicroBatch] = deque()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world - 1

    def recv_forward(self) -> Optional[torch.Tensor]:
        if self.is_first:
            return None
        buf = self.pool.get()  # clean: handed to the caller
        dist.recv(buf, self.rank - 1)
        return buf

    def recv_backward(self) -> Optional[torch.Tensor]:
        if self.is_last:
            return None
        buf = self.pool.get()  # clean: handed to the caller
        dist.recv(buf, self.rank + 1)
        return buf

    def forward_step(self, index: int, data: Optional[torch.Tensor]) -> None:
        x = self.recv_forward()  # clean: near miss, kept in the stash and put back by backward_step
        mb = MicroBatch(index, inputs=x)
        mb.outputs = self.module(x if x is not None else data)
        if not self.is_last:
            dist.send(mb.outputs, self.rank + 1)
        self.stash.append(mb)

    def backward_step(self) -> None:
        mb = self.stash.popleft()
        g = self.recv_backward()  # clean: near miss, None on the last stage, put back otherwise
        torch.autograd.backward([mb.outputs], [g] if g is not None else None)
        if g is not None:
            self.pool.put(g)
        if mb.inputs is not None:
            self.pool.put(mb.inputs)

    def eval_step(self, data: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        x = self.recv_forward()  # leak: a non-last stage returns without putting the input back
        y = self.module(x if x is not None else data)
        if not self.is_last:
            dist.send(y, self.rank + 1)
            return None
        if x is not None:
            self.pool.put(x)
        return y

    def flush_gradients(self, n: int) -> float:
        total = 0.0
        for _ in range(n):
            g = self.recv_backward()  # leak: a zero gradient makes the loop continue with the buffer out
            if g is None:
                break
            norm = float(g.norm())
            if norm == 0.0:
                continue
            total += norm
            self.pool.put(g)
        return total

    def probe_latency(self, rounds: int) -> List[float]:
        buf = self.pool.get()  # clean: put back after the loop
        times = []
        for i in range(rounds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            dist.send(buf, (self.rank + 1) % self.world)
            end.record()
            times.append(start.elapsed_time(end))
        self.pool.put(buf)
        return times

    def broadcast_loss(self, loss: Optional[torch.Tensor]) -> float:
        buf = self.pool.get()  # leak: the view named flat is what goes on, buf never returns to the pool
        flat = buf.view(-1)[:1]
        if self.is_last and loss is not None:
            flat.copy_(loss.detach())
        dist.broadcast(flat, self.world - 1)
        return float(flat)

    def preheat(self) -> None:
        bufs = []
        for _ in range(2 * self.world):
            bufs.append(self.pool.get())  # clean: near miss, the loop variable of the second loop puts each back
        for b in bufs:
            b.zero_()
            self.pool.put(b)
        logger.debug("pool has %d buffers", len(self.pool))

    def drain(self) -> None:
        while self.stash:
            mb = self.stash.popleft()
            if mb.inputs is not None:
                self.pool.put(mb.inputs)
