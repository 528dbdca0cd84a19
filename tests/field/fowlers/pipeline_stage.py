"""One stage of a pipeline-parallel model: schedules, activation slots, receive buffers."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Optional

import torch


class ActivationTable:
    """A slot for each micro batch between its forward and its backward."""

    def __init__(self, slots: int) -> None:
        self._rows: list[Optional[int]] = [None] * slots
        self._values: list[Optional[torch.Tensor]] = [None] * slots

    def enter(self, micro: int) -> int:
        slot = self._rows.index(None)
        self._rows[slot] = micro
        return slot

    def keep(self, slot: int, value: torch.Tensor) -> None:
        self._values[slot] = value

    def value(self, slot: int) -> torch.Tensor:
        return self._values[slot]

    def leave(self, slot: int) -> None:
        self._rows[slot] = None
        self._values[slot] = None


@dataclass(eq=False)
class WireBuf:
    kind: str
    data: torch.Tensor


class WireBuffers:
    def __init__(self, shapes: dict[str, tuple[int, ...]], each: int) -> None:
        self._shapes = shapes
        self._shelf = {k: [WireBuf(k, torch.empty(s)) for _ in range(each)] for k, s in shapes.items()}

    def borrow(self, kind: str) -> WireBuf:
        shelf = self._shelf[kind]
        return shelf.pop() if shelf else WireBuf(kind, torch.empty(self._shapes[kind]))

    def restore(self, buf: WireBuf) -> None:
        self._shelf[buf.kind].append(buf)


class Link:
    def __init__(self, peer: int, transport) -> None:
        self.peer, self._transport = peer, transport

    def recv(self, buf: WireBuf) -> bool:
        return self._transport.recv_into(self.peer, buf.data)

    def send(self, data: torch.Tensor) -> None:
        self._transport.send(self.peer, data)


class PipelineStage:
    def __init__(self, index: int, count: int, module, table: ActivationTable, bufs: WireBuffers,
                 up: Optional[Link], down: Optional[Link]) -> None:
        self.index, self.count = index, count
        self.module, self.table, self.bufs = module, table, bufs
        self.up, self.down = up, down
        self._slots: dict[int, int] = {}
        self._inputs: dict[int, Optional[WireBuf]] = {}

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def forward_step(self, micro: int, x: Optional[torch.Tensor] = None) -> torch.Tensor:
        buf = None
        if not self.is_first:
            buf = self.bufs.borrow("act")  # clean: near miss, kept in _inputs, backward_step restores it
            self.up.recv(buf)
            x = buf.data.requires_grad_()
        self._inputs[micro] = buf
        slot = self.table.enter(micro)  # clean: near miss, kept in _slots, backward_step leaves it
        self._slots[micro] = slot
        y = self.module(x)
        self.table.keep(slot, y)
        if not self.is_last:
            self.down.send(y.detach())
        return y

    def backward_step(self, micro: int, loss: Optional[torch.Tensor] = None) -> None:
        slot = self._slots.pop(micro)
        buf = self._inputs.pop(micro)
        if self.is_last:
            loss.backward()
        else:
            grad = self.bufs.borrow("grad")  # clean: restored in the same branch
            self.down.recv(grad)
            torch.autograd.backward(self.table.value(slot), grad.data)
            self.bufs.restore(grad)
        if not self.is_first:
            self.up.send(buf.data.grad)
            self.bufs.restore(buf)
        self.table.leave(slot)

    def eval_step(self, micro: int, loss_fn: Callable, x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        slot = self.table.enter(micro)  # leak: only the last stage leaves the slot
        with torch.no_grad():
            y = self.module(x)
        self.table.keep(slot, y)
        if self.is_last:
            loss = loss_fn(self.table.value(slot))
            self.table.leave(slot)
            return loss
        self.down.send(y)
        return None


class InterleavedStage(PipelineStage):
    """Several model chunks on one rank; receives are posted ahead."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._posted: Deque[WireBuf] = deque()
        self._loss_buf: Optional[WireBuf] = None
        self._meta_buf: Optional[WireBuf] = None

    def warmup(self, n: int) -> int:
        for _ in range(n):
            buf = self.bufs.borrow("act")  # leak: the one whose receive is refused is left by the break
            if not self.up.recv(buf):
                break
            self._posted.append(buf)
        return len(self._posted)

    def steady(self, n: int) -> list[torch.Tensor]:
        outs = []
        for _ in range(min(n, len(self._posted))):
            buf = self._posted.popleft()
            outs.append(self.module(buf.data))
            self.bufs.restore(buf)
        return outs

    def cooldown(self) -> None:
        while self._posted:
            self.bufs.restore(self._posted.popleft())

    def begin_batch(self) -> None:
        if self.is_last:
            self._loss_buf = self.bufs.borrow("loss")  # leak: end_batch gives it back on the first stage only
            self._loss_buf.data.zero_()
        if self.count > 1:
            self._meta_buf = self.bufs.borrow("meta")  # clean: near miss, end_batch restores it under the same test

    def end_batch(self) -> Optional[float]:
        mean = None
        if self.is_last:
            mean = float(self._loss_buf.data.mean())
        if self.is_first and self._loss_buf is not None:
            self.bufs.restore(self._loss_buf)
        self._loss_buf = None
        if self.count > 1:
            self.bufs.restore(self._meta_buf)
            self._meta_buf = None
        return mean


def run_1f1b(stage: PipelineStage, micros: list[torch.Tensor], loss_fn: Callable) -> list[float]:
    warm = min(stage.count - stage.index - 1, len(micros))
    losses: list[float] = []
    pending: Deque[tuple[int, torch.Tensor]] = deque()
    for i in range(warm):
        pending.append((i, stage.forward_step(i, micros[i])))
    for i in range(warm, len(micros)):
        pending.append((i, stage.forward_step(i, micros[i])))
        j, y = pending.popleft()
        loss = loss_fn(y) if stage.is_last else None
        stage.backward_step(j, loss)
        if loss is not None:
            losses.append(float(loss))
    while pending:
        j, y = pending.popleft()
        stage.backward_step(j, loss_fn(y) if stage.is_last else None)
    return losses


def relay(link_in: Link, link_out: Link, bufs: WireBuffers, n: int, depth: int) -> int:
    """Passes n activations on with `depth` buffers in flight."""
    flight: Deque[WireBuf] = deque()
    for _ in range(n):
        buf = bufs.borrow("act")  # leak: the last of the queue is not restored by the loop at the end
        link_in.recv(buf)
        flight.append(buf)
        if len(flight) == depth:
            head = flight.popleft()
            link_out.send(head.data)
            bufs.restore(head)
    sent = n - len(flight)
    while len(flight) > 1:
        head = flight.popleft()
        link_out.send(head.data)
        bufs.restore(head)
        sent += 1
    return sent


def relay_grads(link_in: Link, link_out: Link, bufs: WireBuffers, n: int, depth: int) -> int:
    flight: Deque[WireBuf] = deque()
    sent = 0
    for i in range(n):
        buf = bufs.borrow("grad")  # clean: near miss, the queue is emptied to the last one
        link_in.recv(buf)
        flight.append(buf)
        while len(flight) >= depth or (i == n - 1 and flight):
            head = flight.popleft()
            link_out.send(head.data)
            bufs.restore(head)
            sent += 1
    return sent
