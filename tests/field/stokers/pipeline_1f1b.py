from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Set

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class StageBufferPool:
    """Fixed set of equally shaped buffers shared by the micro batches of one stage."""

    def __init__(self, count: int, shape: torch.Size, dtype: torch.dtype, device: str) -> None:
        self._free: Deque[torch.Tensor] = deque(
            torch.empty(shape, dtype=dtype, device=device) for _ in range(count)
        )
        self._lent: Dict[int, torch.Tensor] = {}

    def rent(self) -> torch.Tensor:
        if not self._free:
            raise RuntimeError("stage buffers exhausted")
        buf = self._free.popleft()
        self._lent[buf.data_ptr()] = buf
        return buf

    def try_rent(self) -> Optional[torch.Tensor]:
        if not self._free:
            return None
        return self.rent()  # clean: handed on to the caller

    def hand_back(self, buf: torch.Tensor) -> None:
        self._lent.pop(buf.data_ptr())
        self._free.append(buf)


class P2PLink:
    def __init__(self, group: dist.ProcessGroup, prev_rank: int, next_rank: int) -> None:
        self.group = group
        self.prev_rank = prev_rank
        self.next_rank = next_rank

    def recv(self, buf: torch.Tensor, peer: int) -> bool:
        more = torch.zeros(1, dtype=torch.int32, device=buf.device)
        dist.recv(more, src=peer, group=self.group)
        if not more.item():
            return False
        dist.recv(buf, src=peer, group=self.group)
        return True

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        more = torch.ones(1, dtype=torch.int32, device=tensor.device)
        dist.send(more, dst=peer, group=self.group)
        dist.send(tensor, dst=peer, group=self.group)


@dataclass
class MicroBatch:
    index: int
    inp: torch.Tensor
    out: torch.Tensor
    frozen: bool = False


class PipelineStage:
    def __init__(
        self,
        module: torch.nn.Module,
        link: P2PLink,
        acts: StageBufferPool,
        grads: StageBufferPool,
        is_first: bool,
        frozen_steps: Optional[Set[int]] = None,
    ) -> None:
        self.module = module
        self.link = link
        self.acts = acts
        self.grads = grads
        self.is_first = is_first
        self.frozen_steps = frozen_steps or set()
        self.inflight: Deque[MicroBatch] = deque()
        self.warm_buf: Optional[torch.Tensor] = None
        self.accum: Optional[torch.Tensor] = None

    def begin_epoch(self) -> None:
        if self.warm_buf is None:
            self.warm_buf = self.acts.rent()  # clean: near miss, only taken where none is held and close() returns it
        self.warm_buf.zero_()
        self.accum = self.grads.rent()  # leak: every further epoch overwrites the accumulator of the one before
        self.accum.zero_()

    def recv_activation(self) -> Optional[torch.Tensor]:
        buf = self.acts.rent()  # leak: dropped when the peer signals the end of its stream
        if not self.link.recv(buf, self.link.prev_rank):
            logger.debug("no more activations from %d", self.link.prev_rank)
            return None
        return buf

    def recv_gradient(self) -> Optional[torch.Tensor]:
        buf = self.grads.rent()  # clean: near miss, handed back where the peer sends nothing, else to the caller
        if not self.link.recv(buf, self.link.next_rank):
            self.grads.hand_back(buf)
            return None
        return buf

    def forward_one(self, index: int) -> bool:
        inp = self.recv_activation()  # clean: near miss, rolled back without an output buffer, else kept in the micro batch
        if inp is None:
            return False
        out = self.acts.try_rent()  # clean: kept in the micro batch until it retires
        if out is None:
            self.acts.hand_back(inp)
            return False
        out.copy_(self.module(inp))
        self.link.send(out, self.link.next_rank)
        self.inflight.append(MicroBatch(index, inp, out, index in self.frozen_steps))
        return True

    def _retire(self, mb: MicroBatch) -> None:
        self.acts.hand_back(mb.inp)
        self.acts.hand_back(mb.out)

    def backward_one(self) -> bool:
        mb = self.inflight.popleft()
        grad = self.recv_gradient()  # leak: a frozen micro batch retires without handing its gradient back
        if grad is None:
            self._retire(mb)
            return False
        if mb.frozen:
            self._retire(mb)
            return True
        inp_grad = torch.autograd.grad(self.module(mb.inp.requires_grad_()), mb.inp, grad)[0]
        if not self.is_first:
            staged = self.grads.rent()  # clean: handed back after the send
            staged.copy_(inp_grad)
            self.link.send(staged, self.link.prev_rank)
            self.grads.hand_back(staged)
        self.grads.hand_back(grad)
        self._retire(mb)
        return True

    def run(self, n_micro: int, depth: int) -> int:
        done = 0
        for i in range(n_micro):
            if not self.forward_one(i):
                break
            if len(self.inflight) >= depth:
                self.backward_one()
                done += 1
        while self.inflight:
            self.backward_one()
            done += 1
        return done

    def evaluate(self, n_micro: int, padding: Set[int], loss_fn: Callable[[torch.Tensor], torch.Tensor]) -> List[float]:
        losses: List[float] = []
        for i in range(n_micro):
            buf = self.recv_activation()  # leak: padding micro batches continue without handing the buffer back
            if buf is None:
                break
            if i in padding:
                continue
            with torch.no_grad():
                losses.append(loss_fn(self.module(buf)).item())
            self.acts.hand_back(buf)
        return losses

    def probe_latency(self, rounds: int) -> Optional[float]:
        buf = self.acts.rent()  # clean: near miss, the finally covers the early return
        try:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(rounds):
                self.module(buf)
            end.record()
            if rounds == 0:
                return None
            end.synchronize()
            return start.elapsed_time(end) / rounds
        finally:
            self.acts.hand_back(buf)

    def close(self) -> None:
        while self.inflight:
            self._retire(self.inflight.popleft())
        if self.warm_buf is not None:
            self.acts.hand_back(self.warm_buf)
            self.warm_buf = None
        if self.accum is not None:
            self.grads.hand_back(self.accum)
            self.accum = None
