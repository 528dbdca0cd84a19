from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn


class RecvPool:
    def __init__(self, shape: torch.Size, dtype: torch.dtype, depth: int):
        self.shape, self.dtype = shape, dtype
        self._idle = [torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True) for _ in range(depth)]

    def take(self) -> Tensor:
        return self._idle.pop() if self._idle else torch.empty(self.shape, dtype=self.dtype, device="cuda", requires_grad=True)

    def recycle(self, t: Tensor) -> None:
        t.grad = None
        self._idle.append(t)


class CreditWindow:
    def __init__(self, credits: int):
        self._credits = credits

    def grab(self) -> bool:
        if self._credits == 0:
            return False
        self._credits -= 1
        return True

    def refund(self, n: int = 1) -> None:
        self._credits += n


@dataclass
class Microbatch:
    index: int
    inp: Optional[Tensor]
    out: Tensor
    grad_buf: Optional[Tensor] = None


class StageComm:
    def __init__(self, pool: RecvPool, prev: Optional[int], nxt: Optional[int]):
        self.pool = pool
        self.prev, self.nxt = prev, nxt
        self._sends: Deque[tuple[dist.Work, Optional[Tensor]]] = deque()

    def recv_forward(self) -> Optional[Tensor]:
        if self.prev is None:
            return None
        buf = self.pool.take()  # clean: returned to the caller
        dist.recv(buf.detach(), src=self.prev)
        return buf

    def recv_backward(self) -> Tensor:
        buf = self.pool.take()  # clean: near miss, both branches return it
        if self.nxt is None:
            buf.detach().fill_(1.0)
            return buf
        dist.recv(buf.detach(), src=self.nxt)
        return buf

    def recv_shape(self) -> Optional[torch.Size]:
        buf = self.pool.take()  # leak: the zero header of an idle peer returns None without recycle
        if self.prev is None:
            self.pool.recycle(buf)
            return None
        dist.recv(buf.detach(), src=self.prev)
        dims = [int(v) for v in buf.detach().view(-1)[:4]]
        if not any(dims):
            return None
        self.pool.recycle(buf)
        return torch.Size(dims)

    def send_async(self, t: Tensor, dst: int, owned: bool = False) -> None:
        self._sends.append((dist.isend(t.detach(), dst), t if owned else None))

    def drain(self) -> None:
        while self._sends:
            work, owned = self._sends.popleft()
            work.wait()
            if owned is not None:
                self.pool.recycle(owned)


class OneFOneB:
    def __init__(self, stage: nn.Module, comm: StageComm, window: CreditWindow, loss_fn: Callable[[Tensor], Tensor]):
        self.stage = stage
        self.comm = comm
        self.window = window
        self.loss_fn = loss_fn
        self._live: Deque[Microbatch] = deque()

    def forward_step(self, index: int, data: Tensor) -> None:
        inp = self.comm.recv_forward()  # clean: near miss, None on the first stage and otherwise kept in the Microbatch until backward
        out = self.stage(data if inp is None else inp)
        if self.comm.nxt is None:
            out = self.loss_fn(out)
        else:
            self.comm.send_async(out, self.comm.nxt)
        self._live.append(Microbatch(index, inp, out))

    def backward_step(self) -> None:
        mb = self._live.popleft()
        grad = self.comm.recv_backward()  # leak: only stages with an upstream input reach the recycle, the first stage keeps the buffer
        torch.autograd.backward(mb.out, grad if self.comm.nxt is not None else None)
        if mb.inp is None:
            return
        self.comm.send_async(mb.inp.grad.clone(), self.comm.prev)
        self.comm.pool.recycle(mb.inp)
        self.comm.pool.recycle(grad)

    def run(self, batches: list[Tensor], warmup: int) -> int:
        sent = 0
        for i, data in enumerate(batches):
            if not self.window.grab():  # clean: near miss, credits are refunded one for each backward and the stop leaves sent right
                break
            self.forward_step(i, data)
            sent += 1
            if i >= warmup:
                self.backward_step()
                self.window.refund()
                sent -= 1
        while self._live:
            self.backward_step()
        self.window.refund(sent)
        self.comm.drain()
        return sent

    def evaluate(self, batches: list[Tensor]) -> list[Tensor]:
        outs: list[Tensor] = []
        with torch.no_grad():
            for data in batches:
                inp = self.comm.recv_forward()  # leak: on middle and last stages the received buffer is used and dropped
                out = self.stage(data if inp is None else inp)
                if self.comm.nxt is None:
                    outs.append(self.loss_fn(out))
                    continue
                self.comm.send_async(out, self.comm.nxt)
                self.comm.drain()
        return outs

    def relay(self, count: int) -> None:
        for _ in range(count):
            inp = self.comm.recv_forward()  # clean: near miss, an owned send is recycled by drain and the last stage recycles itself
            if inp is None:
                break
            if self.comm.nxt is None:
                self.comm.pool.recycle(inp)
            else:
                self.comm.send_async(inp, self.comm.nxt, owned=True)
        self.comm.drain()

    def exchange_norm(self, local: float) -> float:
        buf = self.comm.pool.take()  # leak: sent without owned, so drain() does not recycle it
        buf.detach().fill_(local)
        total = local
        if self.comm.prev is not None:
            other = self.comm.recv_forward()  # clean: recycled in this branch, where it cannot be None
            total += float(other.detach().view(-1)[0])
            self.comm.pool.recycle(other)
            buf.detach().fill_(total)
        if self.comm.nxt is not None:
            self.comm.send_async(buf, self.comm.nxt)
            self.comm.drain()
        else:
            self.comm.pool.recycle(buf)
        return total

    def try_prefetch(self, ahead: int) -> list[Tensor]:
        ready: list[Tensor] = []
        for _ in range(ahead):
            if not self.window.grab():  # leak: the None of the first stage breaks with the credit spent
                break
            buf = self.comm.recv_forward()  # clean: near miss, None is no holding and the rest is handed over in the list
            if buf is None:
                break
            ready.append(buf)
        return ready

    def consume(self, ready: list[Tensor]) -> None:
        for buf in ready:
            with torch.no_grad():
                self.stage(buf)
            self.comm.pool.recycle(buf)
            self.window.refund()

    def flush(self, ahead: int) -> None:
        self.consume(self.try_prefetch(ahead))  # clean: near miss, consume recycles each buffer and refunds its credit

    def reset(self) -> None:
        for mb in self._live:
            if mb.inp is not None:
                self.comm.pool.recycle(mb.inp)
        self._live.clear()
        self.comm.drain()
