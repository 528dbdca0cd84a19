"""1F1B pipeline stage: activation buffers travel through queues between forward and backward."""

import collections
import logging
from typing import Any, Deque, Dict, List, Optional, Tuple, Union

import torch
import torch.nn as nn

logger = logging.getLogger(__name__)


class ActivationPool:
    def __init__(self, shape: Tuple[int, ...], n: int) -> None:
        self.shape = shape
        self.buffers = [torch.zeros(shape) for _ in range(n)]
        self.idle: Deque[int] = collections.deque(range(n))

    def getBuffer(self) -> Optional[int]:
        if len(self.idle) == 0:
            return None
        return self.idle.popleft()  # clean: goes to the caller

    def returnBuffer(self, ix: int) -> None:
        self.idle.append(ix)

    def __getitem__(self, ix: int) -> torch.Tensor:
        return self.buffers[ix]


class PipelineStage(nn.Module):
    def __init__(self, body: nn.Module, pool: ActivationPool, *, recompute: bool = False, last: bool = False):
        super().__init__()
        self.body = body
        self.pool = pool
        self.recompute = recompute
        self.last = last
        self.stash: Deque[Tuple[int, int]] = collections.deque()
        self.inbox: Dict[int, int] = {}
        self.warm: List[int] = []

    def forwardStep(self, micro: int, x: torch.Tensor) -> Optional[torch.Tensor]:
        ix = self.pool.getBuffer()  # clean: stashed, backwardStep returns it
        if ix is None:
            return None
        self.pool[ix].copy_(x)
        self.stash.append((micro, ix))
        return self.body(self.pool[ix])

    def backwardStep(self, grad: torch.Tensor) -> int:
        micro, ix = self.stash.popleft()
        out = self.body(self.pool[ix].detach().requires_grad_())
        out.backward(grad)
        self.pool.returnBuffer(ix)
        return micro

    def evalStep(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        ix = self.pool.getBuffer()  # leak: the last stage returns its output without returnBuffer
        if ix is None:
            return None
        self.pool[ix].copy_(x)
        y = self.body(self.pool[ix])
        if self.last:
            return y.mean()
        self.pool.returnBuffer(ix)
        return y

    def evalStepChecked(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        ix = self.pool.getBuffer()  # clean: near miss, both returns come after returnBuffer
        if ix is None:
            return None
        self.pool[ix].copy_(x)
        y = self.body(self.pool[ix]).clone()
        self.pool.returnBuffer(ix)
        if self.last:
            return y.mean()
        return y

    def receive(self, micro: int, x: torch.Tensor) -> bool:
        ix = self.pool.getBuffer()  # leak: a duplicate micro batch returns False with the buffer
        if ix is None:
            return False
        if micro in self.inbox:
            logger.warning("duplicate micro batch %d", micro)
            return False
        self.pool[ix].copy_(x)
        self.inbox[micro] = ix
        return True

    def consume(self, micro: int) -> Optional[torch.Tensor]:
        ix = self.inbox.pop(micro, None)
        if ix is None:
            return None
        y = self.body(self.pool[ix]).clone()
        self.pool.returnBuffer(ix)
        return y

    def forwardMaybe(self, micro: int, x: torch.Tensor) -> torch.Tensor:
        ix = None
        if not self.recompute:
            ix = self.pool.getBuffer()  # clean: near miss, stashed whenever it is not None
        if ix is not None:
            self.pool[ix].copy_(x)
            self.stash.append((micro, ix))
        return self.body(x)

    def warmUp(self, n: int) -> int:
        for _ in range(n):
            ix = self.pool.getBuffer()  # leak: coolDown returns every second one and drops the list
            if ix is None:
                break
            self.warm.append(ix)
        return len(self.warm)

    def coolDown(self) -> None:
        for k, ix in enumerate(self.warm):
            if k % 2 == 0:
                self.pool.returnBuffer(ix)
        self.warm = []

    def flushStash(self) -> int:
        n = len(self.stash)
        for _, ix in self.stash:
            self.pool.returnBuffer(ix)
        self.stash.clear()
        return n

    def skipBubble(self, xs: List[Union[torch.Tensor, None]]) -> List[Any]:
        ys: List[Any] = []
        for x in xs:
            ix = self.pool.getBuffer()  # leak: a None input continues past returnBuffer
            if ix is None:
                break
            if x is None:
                ys.append(None)
                continue
            self.pool[ix].copy_(x)
            ys.append(self.body(self.pool[ix]).clone())
            self.pool.returnBuffer(ix)
        return ys

    def skipBubbleEarly(self, xs: List[Union[torch.Tensor, None]]) -> List[Any]:
        ys: List[Any] = []
        for x in xs:
            if x is None:
                ys.append(None)
                continue
            ix = self.pool.getBuffer()  # clean: near miss, nothing is held at the continue
            if ix is None:
                break
            self.pool[ix].copy_(x)
            ys.append(self.body(self.pool[ix]).clone())
            self.pool.returnBuffer(ix)
        return ys


def run_1f1b(stage: PipelineStage, xs: List[torch.Tensor], depth: int) -> int:
    done = 0
    for i, x in enumerate(xs):
        y = stage.forwardStep(i, x)
        if y is None or len(stage.stash) > depth:
            stage.backwardStep(torch.ones(stage.pool.shape))
            done += 1
    while stage.stash:
        stage.backwardStep(torch.ones(stage.pool.shape))
        done += 1
    return done


def loopback(pool: ActivationPool, q: Deque[int], x: torch.Tensor) -> bool:
    ix = pool.getBuffer()  # clean: appended to the queue, drain_loop returns it
    if ix is None:
        return False
    pool[ix].copy_(x)
    q.append(ix)
    return True


def drain_loop(pool: ActivationPool, q: Deque[int]) -> float:
    acc = 0.0
    while q:
        ix = q.popleft()
        acc += float(pool[ix].sum())
        pool.returnBuffer(ix)
    return acc


def loop_bounded(pool: ActivationPool, q: Deque[int], x: torch.Tensor, bound: int) -> None:
    ix = pool.getBuffer()  # leak: a full queue means neither append nor return
    if ix is not None and len(q) < bound:
        pool[ix].copy_(x)
        q.append(ix)
