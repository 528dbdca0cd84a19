"""One-forward-one-backward pipeline stage with receive buffers and micro-batch slots."""
from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, NamedTuple, Optional

import torch

log = logging.getLogger(__name__)


class RecvBuffer:
    __slots__ = ("index", "tensor", "ring")

    def __init__(self, index: int, tensor: torch.Tensor, ring: "RecvRing"):
        self.index = index
        self.tensor = tensor
        self.ring = ring

    def done(self) -> None:
        self.ring._giveback(self)


class RecvRing:
    """Receive buffers for one direction of a stage."""

    def __init__(self, depth: int, shape, dtype=torch.bfloat16):
        self._ready: Deque[RecvBuffer] = deque()
        for i in range(depth):
            self._ready.append(RecvBuffer(i, torch.empty(shape, dtype=dtype), self))
        self.in_use = 0

    def next_buffer(self) -> Optional[RecvBuffer]:
        if not self._ready:
            return None
        self.in_use += 1
        return self._ready.popleft()

    def _giveback(self, buf: RecvBuffer) -> None:
        self.in_use -= 1
        self._ready.append(buf)


class SlotCounter:
    """Micro-batches in flight on this stage."""

    def __init__(self, limit: int):
        self.limit = limit
        self.active = 0

    def enter(self) -> bool:
        if self.active >= self.limit:
            return False
        self.active += 1
        return True

    def leave(self) -> None:
        self.active -= 1


class Action(enum.Enum):
    FORWARD = "F"
    BACKWARD = "B"
    IDLE = "I"


class Step(NamedTuple):
    action: Action
    micro: int


@dataclass
class InFlight:
    micro: int
    inp: Optional[RecvBuffer]
    output: Optional[torch.Tensor] = None
    extras: List[RecvBuffer] = field(default_factory=list)


class PipelineStage:
    def __init__(self, module, rank: int, last: int, fwd: RecvRing, bwd: RecvRing, slots: SlotCounter, p2p):
        self.module = module
        self.rank = rank
        self.last = last
        self.fwd = fwd
        self.bwd = bwd
        self.slots = slots
        self.p2p = p2p
        self._inflight: Dict[int, InFlight] = {}
        self._skipped: List[int] = []

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.last

    def forward(self, micro: int, batch: Optional[torch.Tensor]) -> bool:
        if micro in self._inflight:
            return False
        if not self.slots.enter():  # clean: near miss, left here, by backward or by abort
            return False
        buf = None
        if not self.is_first:
            buf = self.fwd.next_buffer()  # clean: near miss, backward or abort ends the entry
            if buf is None:
                self.slots.leave()
                return False
            self.p2p.recv(buf.tensor, self.rank - 1)
            batch = buf.tensor
        entry = InFlight(micro, buf)
        entry.output = self.module(batch)
        if not self.is_last:
            self.p2p.send(entry.output, self.rank + 1)
        self._inflight[micro] = entry
        return True

    def backward(self, micro: int) -> None:
        entry = self._inflight.pop(micro)
        grad = None
        if not self.is_last:
            buf = self.bwd.next_buffer()  # clean: near miss, done under the guard it was taken under
            if buf is not None:
                self.p2p.recv(buf.tensor, self.rank + 1)
            grad = buf
        entry.output.backward(None if grad is None else grad.tensor)
        if not self.is_first:
            self.p2p.send(entry.inp.tensor.grad, self.rank - 1)
            entry.inp.done()
        if grad is not None:
            grad.done()
        for extra in entry.extras:
            extra.done()
        self.slots.leave()

    def abort(self) -> None:
        for entry in self._inflight.values():
            if entry.inp is not None:
                entry.inp.done()
            for extra in entry.extras:
                extra.done()
            self.slots.leave()
        self._inflight.clear()

    def attach_extra(self, micro: int) -> bool:
        entry = self._inflight.get(micro)
        if entry is None:
            return False
        buf = self.fwd.next_buffer()  # clean: near miss, in extras of the entry, ended by backward or abort
        if buf is None:
            return False
        self.p2p.recv(buf.tensor, self.rank - 1)
        entry.extras.append(buf)
        return True

    def forward_only(self, micro: int, keep_grad: bool) -> Optional[torch.Tensor]:
        if not self.slots.enter():  # leak: the slot is not left when no receive buffer is ready
            return None
        buf = self.fwd.next_buffer()  # clean: done after the forward
        if buf is None:
            self._skipped.append(micro)
            return None
        self.p2p.recv(buf.tensor, self.rank - 1)
        with torch.set_grad_enabled(keep_grad):
            out = self.module(buf.tensor)
        buf.done()
        self.slots.leave()
        return out

    def peek_gradient(self) -> Optional[float]:
        buf = self.bwd.next_buffer()  # leak: only a non-zero gradient reaches done
        if buf is None:
            return None
        self.p2p.recv(buf.tensor, self.rank + 1)
        norm = float(buf.tensor.norm())
        if norm == 0.0:
            log.warning("zero gradient at stage %d", self.rank)
            return norm
        buf.done()
        return norm

    def receive_into(self, ring: RecvRing, peer: int) -> Optional[RecvBuffer]:
        """Receive into a ring buffer; the caller calls done on it."""
        buf = ring.next_buffer()  # clean: handed to the caller
        if buf is not None:
            self.p2p.recv(buf.tensor, peer)
        return buf

    def relay(self, ring: RecvRing, src: int, dst: int) -> bool:
        buf = self.receive_into(ring, src)  # clean: done after the send
        if buf is None:
            return False
        self.p2p.send(buf.tensor, dst)
        buf.done()
        return True

    def relay_scaled(self, ring: RecvRing, src: int, dst: int, scale: float) -> bool:
        buf = self.receive_into(ring, src)  # leak: buf is rebound, done is never called
        if buf is None:
            return False
        buf = buf.tensor * scale
        self.p2p.send(buf, dst)
        return True

    def collect(self, ring: RecvRing, peer: int, count: int) -> List[torch.Tensor]:
        outs, held = [], []
        for _ in range(count):
            buf = self.receive_into(ring, peer)  # leak: the slice after the loop skips the first buffer
            if buf is None:
                break
            held.append(buf)
            outs.append(buf.tensor.float())
        for buf in held[1:]:
            buf.done()
        return outs


class ScheduleRunner:
    def __init__(self, stage: PipelineStage):
        self.stage = stage
        self._cursor = 0

    def run(self, steps: List[Step], batches: Dict[int, torch.Tensor]) -> int:
        done = 0
        for step in steps:
            if step.action is Action.FORWARD:
                done += self.stage.forward(step.micro, batches.get(step.micro))
            elif step.action is Action.BACKWARD:
                self.stage.backward(step.micro)
            self._cursor += 1
        return done
