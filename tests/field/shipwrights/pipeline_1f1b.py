"""1F1B pipeline schedule for one stage.

Activations between stages live in slots.  ``ActSlots.open`` gives a slot id,
``ActSlots.shut`` takes it back.  A stage keeps the slots of its open
microbatches in ``stash``.
"""
from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist


class SlotsExhausted(Exception):
    pass


class ActSlots:
    def __init__(self, n: int, shape, dtype=torch.bfloat16, device="cuda"):
        self.mem = torch.empty(n, *shape, dtype=dtype, device=device, requires_grad=False)
        self.mask = (1 << n) - 1
        self.parent: Optional["ActSlots"] = None

    def open(self) -> int:
        if not self.mask:
            raise SlotsExhausted()
        bit = self.mask & -self.mask
        self.mask ^= bit
        return bit.bit_length() - 1

    def open_or_none(self) -> Optional[int]:
        return self.open() if self.mask else None  # clean: returned

    def shut(self, i: int) -> None:
        self.mask |= 1 << i

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.mem[i]

    def open_many(self, n: int) -> List[int]:
        got: List[int] = []
        for _ in range(n):
            i = self.open_or_none()  # clean: everything in got is shut before the raise
            if i is None:
                for j in got:
                    self.shut(j)
                raise SlotsExhausted(f"{n} slots asked, {len(got)} there")
            got.append(i)
        return got

    def open_upto(self, n: int, at_least: int) -> Optional[List[int]]:
        got = []
        while len(got) < n:
            i = self.open_or_none()  # leak: fewer than at_least returns None and got is dropped
            if i is None:
                break
            got.append(i)
        if len(got) < at_least:
            return None
        return got


class Flight(NamedTuple):
    mb: int
    slot: int
    out: torch.Tensor


class Link:
    """Point-to-point channel to the neighbours."""

    def __init__(self, prev: Optional[int], nxt: Optional[int], slots: ActSlots):
        self.prev, self.next = prev, nxt
        self.slots = slots
        self.sending: Deque[Tuple[dist.Work, int]] = deque()

    def receive(self) -> int:
        i = self.slots.open()  # clean: returned to the caller
        dist.recv(self.slots[i], self.prev)
        return i

    def receive_checked(self) -> Optional[int]:
        i = self.slots.open()  # leak: a poisoned activation returns None with the slot open
        dist.recv(self.slots[i], self.prev)
        if not torch.isfinite(self.slots[i]).all():
            return None
        return i

    def send(self, t: torch.Tensor) -> None:
        i = self.slots.open()  # clean: in sending until sweep() sees the work done
        self.slots[i].copy_(t)
        self.sending.append((dist.isend(self.slots[i], self.next), i))
        self.sweep()

    def sweep(self, block: bool = False) -> None:
        while self.sending:
            work, i = self.sending[0]
            if block:
                work.wait()
            elif not work.is_completed():
                return
            self.sending.popleft()
            self.slots.shut(i)

    def send_eager(self, t: torch.Tensor, wait: bool) -> Optional[dist.Work]:
        i = self.slots.open()  # leak: without wait the work is returned and the slot id is forgotten
        self.slots[i].copy_(t)
        work = dist.isend(self.slots[i], self.next)
        if wait:
            work.wait()
            self.slots.shut(i)
            return None
        return work


class Stage:
    def __init__(self, module, link: Link, slots: ActSlots, rank: int, depth: int):
        self.module = module
        self.link = link
        self.slots = slots
        self.rank = rank
        self.depth = depth
        self.stash: Dict[int, Flight] = {}
        self.scored: List[Flight] = []
        self.grad_slot: Optional[int] = None
        self.peer_slot: Optional[int] = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def final(self) -> bool:
        return self.rank == self.depth - 1

    # one microbatch ---------------------------------------------------------
    def forward(self, mb: int, x: Optional[torch.Tensor]) -> torch.Tensor:
        if self.first:
            slot = self.slots.open()  # clean: near miss, stashed and shut in backward()
            self.slots[slot].copy_(x)
        else:
            slot = self.link.receive()  # clean: near miss, stashed and shut in backward()
        out = self.module(self.slots[slot].detach().requires_grad_())
        self.stash[mb] = Flight(mb, slot, out)
        if not self.final:
            self.link.send(out.detach())
        return out

    def backward(self, mb: int, grad: Optional[torch.Tensor]) -> None:
        flight = self.stash.pop(mb)
        flight.out.backward(grad)
        self.slots.shut(flight.slot)

    def score(self, batches) -> List[float]:
        """Forward only; the last outputs can be looked at in ``scored``."""
        losses = []
        self.scored.clear()
        for n, x in enumerate(batches):
            slot = self.slots.open()  # leak: the next score() clears the list without shutting the slots
            self.slots[slot].copy_(x)
            with torch.no_grad():
                out = self.module(self.slots[slot])
            self.scored.append(Flight(n, slot, out))
            if self.final:
                losses.append(float(out.mean()))
            else:
                self.link.send(out)
        return losses

    # gradients ------------------------------------------------------------
    def take_grad(self) -> torch.Tensor:
        if self.grad_slot is None:
            self.grad_slot = self.link.receive()  # clean: near miss, shut by drop_grad() of the same field
        return self.slots[self.grad_slot]

    def drop_grad(self) -> None:
        if self.grad_slot is not None:
            self.slots.shut(self.grad_slot)
            self.grad_slot = None

    def peer_grad(self) -> torch.Tensor:
        self.peer_slot = self.link.receive()  # leak: a peer slot that is held already is overwritten
        return self.slots[self.peer_slot]

    def drop_peer(self) -> None:
        if self.peer_slot is not None:
            self.slots.shut(self.peer_slot)
            self.peer_slot = None

    def cooldown(self) -> None:
        while self.stash:
            mb = min(self.stash)
            grad = None if self.final else self.take_grad()
            self.backward(mb, grad)
            self.drop_grad()
        self.link.sweep(block=True)

    def abandon(self) -> None:
        for flight in self.stash.values():
            self.slots.shut(flight.slot)
        self.stash.clear()
        self.drop_grad()
        self.link.sweep(block=True)


def run_1f1b(stage: Stage, micro: List[torch.Tensor]) -> List[torch.Tensor]:
    warm = min(stage.depth - stage.rank - 1, len(micro))
    outs = []
    for mb in range(warm):
        outs.append(stage.forward(mb, micro[mb]))
    for mb in range(warm, len(micro)):
        outs.append(stage.forward(mb, micro[mb]))
        stage.backward(mb - warm, None if stage.final else stage.take_grad())
        stage.drop_grad()
    stage.cooldown()
    return outs


def fill_bubble(stage: Stage, jobs) -> int:
    """Runs small jobs in the idle time of a stage."""
    ran = 0
    got = stage.slots.open_upto(4, at_least=1)  # leak: the slots that no job uses are never shut
    if got is None:
        return 0
    for slot, job in zip(got, jobs):
        job(stage.slots[slot])
        stage.slots.shut(slot)
        ran += 1
    return ran
