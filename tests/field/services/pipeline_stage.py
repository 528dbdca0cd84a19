"""Pipeline-parallel stage: activations of micro-batches in flight."""
import collections
import enum
import logging
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn

LOG = logging.getLogger("pipe")


class Mode(enum.Enum):
    TRAIN = 0
    EVAL = 1
    FORWARD_ONLY = 2


@dataclass
class StageConfig:
    rank: int
    world: int
    micro: int
    shape: Tuple[int, ...]

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.world - 1


class ActivationPool:
    def __init__(self, n: int, shape: Tuple[int, ...]) -> None:
        self.shape = shape
        self.idle: Deque[torch.Tensor] = collections.deque(torch.empty(shape) for _ in range(n))
        self.lent = 0

    def borrow_act(self) -> torch.Tensor:
        self.lent += 1
        if not self.idle:
            return torch.empty(self.shape)
        return self.idle.pop()  # clean: handed out

    def return_act(self, t: torch.Tensor) -> None:
        self.lent -= 1
        self.idle.append(t)


class Stage:
    def __init__(self, cfg: StageConfig, module: nn.Module, pool: ActivationPool) -> None:
        self.cfg = cfg
        self.module = module
        self.pool = pool
        self.inputs: Dict[int, torch.Tensor] = {}
        self.recv_buf: Optional[torch.Tensor] = None

    def recv(self) -> torch.Tensor:
        buf = self.pool.borrow_act()  # clean: handed to the caller
        if not self.cfg.first:
            dist.recv(buf, self.cfg.rank - 1)
        return buf

    def forward_micro(self, i: int, mode: Mode) -> torch.Tensor:
        x = self.recv()  # clean: near miss, kept for the backward in training, given back in any other mode
        y = self.module(x)
        if mode is Mode.TRAIN:
            self.inputs[i] = x
        else:
            self.pool.return_act(x)
        return y

    def backward_micro(self, i: int, grad: torch.Tensor) -> Optional[torch.Tensor]:
        x = self.inputs.pop(i, None)
        if x is None:
            return None
        y = self.module(x)
        y.backward(grad)
        self.pool.return_act(x)
        return x.grad

    def flush(self) -> None:
        for x in self.inputs.values():
            self.pool.return_act(x)
        self.inputs.clear()

    def forward_eval(self, mode: Mode) -> torch.Tensor:
        x = self.recv()  # leak: returned to the pool in EVAL, not in FORWARD_ONLY
        y = self.module(x).clone()
        if mode is Mode.EVAL:
            self.pool.return_act(x)
        return y

    def forward_residual(self) -> torch.Tensor:
        x = self.recv()  # leak: the sum replaces x, only the sum is known afterwards
        x = x + self.module(x)
        return x

    def forward_residual_(self) -> torch.Tensor:
        x = self.recv()  # clean: near miss, added in place, copied, given back
        x += self.module(x)
        out = x.clone()
        self.pool.return_act(x)
        return out

    def send_on(self, y: torch.Tensor) -> None:
        buf = self.pool.borrow_act()  # leak: the last stage returns without sending and without giving back
        buf.copy_(y)
        if self.cfg.last:
            return
        dist.send(buf, self.cfg.rank + 1)
        self.pool.return_act(buf)

    def send_on_checked(self, y: torch.Tensor) -> None:
        if self.cfg.last:
            return
        buf = self.pool.borrow_act()  # clean: near miss, the early return comes first
        buf.copy_(y)
        dist.send(buf, self.cfg.rank + 1)
        self.pool.return_act(buf)

    def prepost(self) -> None:
        if self.recv_buf is None:
            self.recv_buf = self.pool.borrow_act()  # clean: unpost() gives back

    def unpost(self) -> None:
        if self.recv_buf is not None:
            self.pool.return_act(self.recv_buf)
        self.recv_buf = None

    def repost(self) -> None:
        self.recv_buf = self.pool.borrow_act()  # leak: whatever prepost() had put there is overwritten

    def schedule(self, mode: Mode) -> List[torch.Tensor]:
        outs: List[torch.Tensor] = []
        for i in range(self.cfg.micro):
            outs.append(self.forward_micro(i, mode))  # clean: inputs of training wait for backward_micro() or flush()
        return outs

    def peek(self, n: int) -> List[float]:
        means: List[float] = []
        acts = [self.recv() for _ in range(n)]  # clean: near miss, popped one after the other until the list is empty
        while acts:
            a = acts.pop()
            means.append(a.mean().item())
            self.pool.return_act(a)
        return means

    def peek_until_nan(self, n: int) -> int:
        acts = [self.recv() for _ in range(n)]  # leak: a NaN ends the loop with the others still in the list
        seen = 0
        while acts:
            a = acts.pop()
            bad = bool(a.isnan().any())
            self.pool.return_act(a)
            if bad:
                break
            seen += 1
        return seen

    def interleave(self, fns: List[Callable[[torch.Tensor], None]]) -> None:
        cur = self.recv()  # clean: given back at the end of the chain
        for fn in fns:
            nxt = self.pool.borrow_act()  # clean: near miss, the old one is given back before the name moves on
            nxt.copy_(cur)
            fn(nxt)
            self.pool.return_act(cur)
            cur = nxt
        self.pool.return_act(cur)

    def chain(self, fns: List[Callable[[torch.Tensor], None]]) -> None:
        cur = self.recv()  # leak: overwritten by the first link of the chain
        for fn in fns:
            nxt = self.pool.borrow_act()  # leak: each link but the last is overwritten by its successor
            nxt.copy_(cur)
            fn(nxt)
            cur = nxt
        self.pool.return_act(cur)
