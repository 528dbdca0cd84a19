"""One-forward-one-backward schedule of a pipeline stage.

Activations that arrive from the previous stage and gradients that arrive from the next one land in slots of
two rings. A slot is taken before the receive is posted and must be vacated after its last reader is done.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Iterator, Optional

import torch
import torch.distributed as dist


class SlotRing:
    def __init__(self, count: int, shape: tuple[int, ...], device: str = "cuda"):
        self.slots = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(count)]
        self.vacant = list(range(count))
        self.high_water = 0

    def occupy(self) -> int:
        if not self.vacant:
            raise RuntimeError("pipeline ring exhausted, schedule and ring depth disagree")
        idx = self.vacant.pop()
        self.high_water = max(self.high_water, len(self.slots) - len(self.vacant))
        return idx

    def vacate(self, idx: int) -> None:
        self.slots[idx].grad = None
        self.vacant.append(idx)

    def __getitem__(self, idx: int) -> torch.Tensor:
        return self.slots[idx]


@dataclass
class MicroBatch:
    number: int
    in_slot: int = -1
    grad_slot: int = -1
    output: Optional[torch.Tensor] = None
    tokens: int = 0


class Stage:
    def __init__(self, rank: int, size: int, module, acts: SlotRing, grads: SlotRing, spare: SlotRing):
        self.rank = rank
        self.size = size
        self.module = module
        self.acts = acts
        self.grads = grads
        self.spare = spare
        self.pending: deque[MicroBatch] = deque()
        self.loss_log: list[float] = []

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    # -- receive and send ----------------------------------------------------------------------------------
    def recv_forward(self, mb: MicroBatch) -> Optional[torch.Tensor]:
        if self.first:
            return None
        mb.in_slot = self.acts.occupy()  # clean: near miss, backward_one vacates it under the same stage test
        dist.recv(self.acts[mb.in_slot], src=self.rank - 1)
        return self.acts[mb.in_slot]

    def recv_backward(self, mb: MicroBatch) -> Optional[torch.Tensor]:
        if self.last:
            return None
        mb.grad_slot = self.grads.occupy()  # clean: backward_one vacates it when set
        dist.recv(self.grads[mb.grad_slot], src=self.rank + 1)
        return self.grads[mb.grad_slot]

    def forward_one(self, mb: MicroBatch, batch: torch.Tensor) -> None:
        x = self.recv_forward(mb)  # clean: the slot number is in mb, backward_one vacates it
        if x is None:
            x = batch
        mb.output = self.module(x)
        if self.last:
            self.loss_log.append(float(mb.output))
        else:
            dist.send(mb.output.detach(), dst=self.rank + 1)
        self.pending.append(mb)

    def backward_one(self) -> None:
        mb = self.pending.popleft()
        grad = self.recv_backward(mb)  # clean: vacated below through mb.grad_slot
        torch.autograd.backward(mb.output, grad)
        if not self.first:
            dist.send(self.acts[mb.in_slot].grad, dst=self.rank - 1)
            self.acts.vacate(mb.in_slot)
        if mb.grad_slot >= 0:
            self.grads.vacate(mb.grad_slot)
        mb.output = None

    def run(self, batches: list[torch.Tensor]) -> None:
        warm = min(self.size - self.rank - 1, len(batches))
        feed = iter(enumerate(batches))
        for _ in range(warm):
            n, b = next(feed)
            self.forward_one(MicroBatch(n), b)
        for n, b in feed:
            self.forward_one(MicroBatch(n), b)
            self.backward_one()
        while self.pending:
            self.backward_one()

    # -- variants ------------------------------------------------------------------------------------------
    def eval_one(self, mb: MicroBatch, batch: torch.Tensor) -> Optional[float]:
        x = batch
        if not self.first:
            slot = self.acts.occupy()  # leak: an inner stage returns after the send without vacating it
            dist.recv(self.acts[slot], src=self.rank - 1)
            x = self.acts[slot]
        with torch.no_grad():
            y = self.module(x)
        if not self.last:
            dist.send(y, dst=self.rank + 1)
            return None
        loss = float(y)
        if not self.first:
            self.acts.vacate(slot)
        return loss


class InterleavedStage(Stage):
    """Several model chunks per rank; the input slots are kept per chunk."""

    def __init__(self, *args, chunks: int = 2, **kw):
        super().__init__(*args, **kw)
        self.lanes: list[deque[tuple[int, int]]] = [deque() for _ in range(chunks)]

    def enter(self, chunk: int, number: int) -> torch.Tensor:
        slot = self.acts.occupy()  # leak: leave() vacates only chunk 0's slots, abort drops the rest
        self.lanes[chunk].append((number, slot))
        return self.acts[slot]

    def leave(self, chunk: int) -> int:
        number, slot = self.lanes[chunk].popleft()
        if chunk == 0:
            self.acts.vacate(slot)
        return number

    def abort(self) -> None:
        for lane in self.lanes:
            lane.clear()


def probe_shapes(ring: SlotRing, peer: int, rounds: int) -> list[float]:
    means = []
    slot = ring.occupy()  # leak: overwritten by the occupy of the first round
    for _ in range(rounds):
        dist.recv(ring[slot], src=peer)
        means.append(float(ring[slot].mean()))
        slot = ring.occupy()  # leak: rebound by the next round, only the last one is vacated
    ring.vacate(slot)
    return means


def rotate_slots(ring: SlotRing, peer: int, rounds: int) -> list[float]:
    means = []
    slot = ring.occupy()  # clean: near miss, vacated before it is rebound
    for _ in range(rounds):
        dist.recv(ring[slot], src=peer)
        means.append(float(ring[slot].mean()))
        ring.vacate(slot)
        slot = ring.occupy()  # clean: vacated by the next round or after the loop
    ring.vacate(slot)
    return means


def incoming(ring: SlotRing, peer: int, count: int) -> Iterator[int]:
    """Receives `count` activations; whoever iterates vacates the slots."""
    for _ in range(count):
        slot = ring.occupy()  # clean: yielded, the consumer owns it
        dist.recv(ring[slot], src=peer)
        yield slot


def relay(ring: SlotRing, src: int, dst: int, count: int) -> int:
    sent = 0
    for slot in incoming(ring, src, count):  # clean: each one is vacated after it was sent on
        dist.send(ring[slot], dst=dst)
        ring.vacate(slot)
        sent += 1
    return sent


def relay_nonzero(ring: SlotRing, src: int, dst: int, count: int) -> int:
    sent = 0
    for slot in incoming(ring, src, count):  # leak: an all-zero activation is passed over with its slot
        if not ring[slot].any():
            continue
        dist.send(ring[slot], dst=dst)
        ring.vacate(slot)
        sent += 1
    return sent
