"""1F1B pipeline stage with pooled receive and send buffers."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist


class P2PBuffers:
    def __init__(self, shape: Tuple[int, ...], dtype: torch.dtype, depth: int) -> None:
        self.shape = shape
        self._free: List[torch.Tensor] = [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(depth)]

    def obtain(self) -> torch.Tensor:
        if not self._free:
            raise RuntimeError("pipeline depth exceeded")
        return self._free.pop()

    def obtain_or_none(self) -> Optional[torch.Tensor]:
        return self._free.pop() if self._free else None

    def recycle(self, t: torch.Tensor) -> None:
        self._free.append(t)


@dataclass
class InFlight:
    mb: int
    buf: torch.Tensor
    work: dist.Work


class Stage:
    def __init__(self, rank: int, world: int, module: torch.nn.Module, acts: P2PBuffers, grads: P2PBuffers) -> None:
        self.rank = rank
        self.world = world
        self.module = module
        self.acts = acts
        self.grads = grads
        self._inputs: Dict[int, torch.Tensor] = {}
        self._outputs: Dict[int, torch.Tensor] = {}
        self._sends: Deque[InFlight] = deque()
        self._next_recv: Optional[InFlight] = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world - 1

    def _recv_act(self) -> Optional[torch.Tensor]:
        if self.is_first:
            return None
        buf = self.acts.obtain()  # clean: returned to the caller
        dist.recv(buf, src=self.rank - 1)
        return buf

    def _recv_grad(self) -> Optional[torch.Tensor]:
        buf = self.grads.obtain()  # leak: the last stage gets no gradient and returns None with the buffer taken
        if self.is_last:
            return None
        dist.recv(buf, src=self.rank + 1)
        return buf

    def forward(self, mb: int, data: Optional[torch.Tensor]) -> torch.Tensor:
        buf = self._recv_act()  # clean: near miss, kept in _inputs for the backward of the micro batch
        if buf is not None:
            self._inputs[mb] = buf
            x = buf.requires_grad_(True)
        else:
            x = data
        out = self.module(x)
        self._outputs[mb] = out
        if not self.is_last:
            self._send_act(mb, out)
        return out

    def _send_act(self, mb: int, out: torch.Tensor) -> None:
        buf = self.acts.obtain()  # clean: near miss, queued in _sends and recycled when the work is done
        buf.copy_(out.detach())
        self._sends.append(InFlight(mb, buf, dist.isend(buf, dst=self.rank + 1)))

    def backward(self, mb: int) -> None:
        out = self._outputs.pop(mb)
        grad = self._recv_grad()  # clean: near miss, None on the last stage, otherwise recycled after the backward
        if grad is None:
            out.mean().backward()
        else:
            torch.autograd.backward(out, grad)
            self.grads.recycle(grad)
        x = self._inputs.pop(mb, None)
        if x is not None:
            dist.send(x.grad, dst=self.rank - 1)
            x.grad = None
            self.acts.recycle(x.detach())

    def poll_sends(self) -> int:
        n = 0
        while self._sends and self._sends[0].work.is_completed():
            self.acts.recycle(self._sends.popleft().buf)
            n += 1
        return n

    def post_recv(self, mb: int) -> None:
        buf = self.acts.obtain_or_none()  # leak: posting again before take_recv overwrites the receive in flight
        if buf is None:
            return
        self._next_recv = InFlight(mb, buf, dist.irecv(buf, src=self.rank - 1))

    def take_recv(self) -> Optional[Tuple[int, torch.Tensor]]:
        if self._next_recv is None:
            return None
        nxt, self._next_recv = self._next_recv, None
        nxt.work.wait()
        return nxt.mb, nxt.buf

    def forward_posted(self) -> Optional[torch.Tensor]:
        got = self.take_recv()  # clean: near miss, the buffer is put into _inputs
        if got is None:
            return None
        mb, buf = got
        self._inputs[mb] = buf
        out = self._outputs[mb] = self.module(buf.requires_grad_(True))
        return out

    def exchange(self, out: torch.Tensor) -> Optional[torch.Tensor]:
        send = self.acts.obtain_or_none()  # leak: without a receive buffer the send buffer is not recycled
        if send is None:
            return None
        recv = self.acts.obtain_or_none()  # clean: returned to the caller, which recycles it
        if recv is None:
            return None
        send.copy_(out)
        ops = [dist.P2POp(dist.isend, send, self.rank + 1), dist.P2POp(dist.irecv, recv, self.rank - 1)]
        for w in dist.batch_isend_irecv(ops):
            w.wait()
        self.acts.recycle(send)
        return recv

    def evaluate(self, steps: int) -> List[torch.Tensor]:
        outs: List[torch.Tensor] = []
        prev = torch.zeros(self.acts.shape, device="cuda")
        for _ in range(steps):
            recv = self.exchange(prev)  # clean: near miss, the output is cloned and the buffer recycled in the same round
            if recv is None:
                break
            prev = self.module(recv).clone()
            self.acts.recycle(recv)
            outs.append(prev)
        return outs

    def relay(self, steps: int) -> Optional[torch.Tensor]:
        last: Optional[torch.Tensor] = None
        for _ in range(steps):
            last = self._recv_act()  # leak: each round overwrites the buffer of the one before
            if last is None:
                return None
            dist.send(last, dst=(self.rank + 1) % self.world)
        if last is not None:
            result = last.clone()
            self.acts.recycle(last)
            return result
        return None

    def sync_shapes(self, ref: torch.Tensor) -> bool:
        buf = self.acts.obtain()  # clean: recycled on equal and on different shapes
        if buf.shape != ref.shape:
            self.acts.recycle(buf)
            return False
        buf.copy_(ref)
        dist.broadcast(buf, src=0)
        same = torch.equal(buf, ref)
        self.acts.recycle(buf)
        return same

    def flush(self) -> None:
        for s in self._sends:
            s.work.wait()
            self.acts.recycle(s.buf)
        self._sends.clear()
        for x in self._inputs.values():
            self.acts.recycle(x.detach())
        self._inputs.clear()
        got = self.take_recv()  # clean: recycled at once
        if got is not None:
            self.acts.recycle(got[1])
