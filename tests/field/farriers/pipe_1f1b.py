"""1F1B pipeline stage with a fixed activation-slot table and p2p receive tickets."""
from __future__ import annotations

import enum
from collections import deque
from typing import Callable, Optional

import torch


class Phase(enum.Enum):
    WARMUP = 0
    STEADY = 1
    COOLDOWN = 2


class ActSlots:
    """Activation slots; the table is sized for num_warmup + 1 in-flight microbatches."""

    def __init__(self, n: int, shape, dtype=torch.bfloat16, device="cuda"):
        self.store = torch.empty((n, *shape), dtype=dtype, device=device)
        self._free = list(range(n))

    def claim(self) -> int:
        if not self._free:
            return -1
        return self._free.pop()

    def retire(self, slot: int) -> None:
        self._free.append(slot)


class RecvTicket:
    def __init__(self, tag: int, work):
        self.tag = tag
        self.work = work


class TicketBook:
    """NCCL p2p tags are a scarce thing on a shared communicator: one per outstanding receive."""

    def __init__(self, ntags: int, group=None):
        self._tags = deque(range(ntags))
        self.group = group

    def issue(self, irecv: Callable, buf: torch.Tensor, src: int) -> Optional[RecvTicket]:
        if not self._tags:
            return None
        tag = self._tags.popleft()
        return RecvTicket(tag, irecv(buf, src, tag=tag))

    def settle(self, t: RecvTicket) -> None:
        t.work.wait()
        self._tags.append(t.tag)


class Stage:
    def __init__(self, mod, slots: ActSlots, book: TicketBook, irecv, isend, rank: int, world: int):
        self.mod, self.slots, self.book = mod, slots, book
        self.irecv, self.isend = irecv, isend
        self.rank, self.world = rank, world
        self.first, self.last = rank == 0, rank == world - 1
        self._inputs: deque[int] = deque()
        self._outputs: dict[int, int] = {}
        self._grad_ticket: Optional[RecvTicket] = None
        self.phase = Phase.WARMUP

    # -- forward ---------------------------------------------------------

    def recv_forward(self) -> int:
        slot = self.slots.claim()  # clean: near miss, retired when no ticket is to be had, otherwise the caller's
        if slot < 0:
            return -1
        if self.first:
            return slot
        t = self.book.issue(self.irecv, self.slots.store[slot], self.rank - 1)  # clean: settled before the slot is returned
        if t is None:
            self.slots.retire(slot)
            return -1
        self.book.settle(t)
        return slot

    def forward(self, mb: int, batch=None) -> bool:
        slot = self.recv_forward()  # clean: near miss, queued in _inputs and retired by the backward or by drain
        if slot < 0:
            return False
        if batch is not None:
            self.slots.store[slot].copy_(batch)
        self._inputs.append(slot)
        out = self.mod(self.slots.store[slot])
        keep = self.slots.claim()  # leak: drain retires the queued inputs and clears the outputs without retiring them
        if keep < 0:
            return False
        self.slots.store[keep].copy_(out)
        self._outputs[mb] = keep
        if not self.last:
            self.isend(self.slots.store[keep], self.rank + 1)
        return True

    def forward_eval(self, batch=None) -> Optional[torch.Tensor]:
        slot = self.recv_forward()  # leak: the last stage returns its logits without retiring the slot
        if slot < 0:
            return None
        if batch is not None:
            self.slots.store[slot].copy_(batch)
        out = self.mod(self.slots.store[slot])
        if self.last:
            return out
        self.isend(out, self.rank + 1)
        self.slots.retire(slot)
        return None

    # -- backward --------------------------------------------------------

    def post_grad_recv(self, buf: torch.Tensor) -> bool:
        if self.last or self._grad_ticket is not None:
            return False
        self._grad_ticket = self.book.issue(self.irecv, buf, self.rank + 1)  # clean: near miss, the guard keeps one at a time and backward settles it
        return self._grad_ticket is not None

    def backward(self, mb: int, grad: torch.Tensor) -> None:
        t, self._grad_ticket = self._grad_ticket, None
        if t is not None:
            self.book.settle(t)
        slot = self._inputs.popleft()
        x = self.slots.store[slot]
        dx = torch.autograd.grad(self.mod(x.requires_grad_()), x, grad)[0]
        self.slots.retire(slot)
        out = self._outputs.pop(mb, None)
        if out is not None:
            self.slots.retire(out)
        if not self.first:
            self.isend(dx, self.rank - 1)

    def drain(self) -> None:
        if self._grad_ticket is not None:
            self.book.settle(self._grad_ticket)
            self._grad_ticket = None
        while self._inputs:
            self.slots.retire(self._inputs.popleft())
        self._outputs.clear()


def run_1f1b(stage: Stage, batches, grad_buf: torch.Tensor, should_stop: Callable[[], bool]) -> int:
    n = len(batches)
    warm = min(stage.world - stage.rank - 1, n)
    for mb in range(warm):
        stage.forward(mb, batches[mb] if stage.first else None)
    stage.phase = Phase.STEADY
    done = 0
    for mb in range(warm, n):
        if should_stop():
            stage.drain()
            return done
        stage.post_grad_recv(grad_buf)
        stage.forward(mb, batches[mb] if stage.first else None)
        stage.backward(done, grad_buf)
        done += 1
    stage.phase = Phase.COOLDOWN
    while done < n:
        stage.post_grad_recv(grad_buf)
        stage.backward(done, grad_buf)
        done += 1
    return done


def shape_handshake(stage: Stage, ndims: int) -> list[int]:
    dims: list[int] = []
    buf = torch.zeros(ndims, dtype=torch.int64)
    for peer in range(stage.world):
        if peer == stage.rank:
            continue
        t = stage.book.issue(stage.irecv, buf, peer)  # leak: a peer that sends a zero shape is skipped with its tag not settled
        if t is None:
            break
        t.work.wait()
        if int(buf[0]) == 0:
            continue
        dims.extend(buf.tolist())
        stage.book.settle(t)
    return dims


def interleave(stage: Stage, chunks: int) -> list[int]:
    got: list[int] = []
    for _ in range(chunks):
        s = stage.slots.claim()  # leak: when the table runs short the slots claimed so far are dropped with the list
        if s < 0:
            return []
        got.append(s)
    return got


def prefill_chunks(stage: Stage, xs: list[torch.Tensor]) -> int:
    mine = interleave(stage, len(xs))  # clean: near miss, an empty list means nothing is held and all else is retired
    if not mine:
        return 0
    for s, x in zip(mine, xs):
        stage.slots.store[s].copy_(x)
        stage.isend(stage.slots.store[s], stage.rank + 1)
    for s in mine:
        stage.slots.retire(s)
    return len(mine)
