"""1F1B pipeline stage: activation slots for micro-batches.

A stage keeps the activations of in-flight micro-batches in a preallocated slab.
Slots of the slab are numbers handed out by a bitmap.
"""
from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import Iterator

import torch
import torch.distributed as dist

logger = logging.getLogger("pipe")

NO_SLOT = -1


class SlotMap:
    """Bitmap of slots. ``claim`` gives the lowest clear bit, or NO_SLOT."""

    def __init__(self, n: int):
        self.n = n
        self._bits = 0

    def claim(self) -> int:
        for i in range(self.n):
            if not self._bits >> i & 1:
                self._bits |= 1 << i
                return i
        return NO_SLOT

    def vacate(self, slot: int) -> None:
        self._bits &= ~(1 << slot)

    def vacate_all(self) -> None:
        self._bits = 0

    def busy(self) -> int:
        return bin(self._bits).count("1")


class Phase(enum.Enum):
    WARMUP = 0
    STEADY = 1
    COOLDOWN = 2


@dataclass
class MicroBatch:
    mb_id: int
    tokens: torch.Tensor
    slot: int = NO_SLOT
    grad_slot: int = NO_SLOT
    re_slot: int = NO_SLOT
    last: bool = False


class Stage:
    def __init__(self, module, slots: int, hidden: tuple[int, ...], prev: int | None, nxt: int | None):
        self.module = module
        self.slots = SlotMap(slots)
        self.grad_slots = SlotMap(slots)
        self.slab = torch.empty((slots, *hidden), device="cuda")
        self.grad_slab = torch.empty((slots, *hidden), device="cuda")
        self.prev = prev
        self.nxt = nxt
        self.live: dict[int, MicroBatch] = {}
        self.phase = Phase.WARMUP
        self.keep_grads = False

    # -- forward ----------------------------------------------------------------

    def forward(self, mb: MicroBatch) -> bool:
        if mb.slot == NO_SLOT:
            mb.slot = self.slots.claim()  # clean: near miss, only for a micro-batch without a slot, ended by backward()
            if mb.slot == NO_SLOT:
                return False
        self.live[mb.mb_id] = mb
        if self.prev is None:
            self.slab[mb.slot].copy_(self.module.embed(mb.tokens))
        else:
            dist.recv(self.slab[mb.slot], self.prev)
        out = self.module(self.slab[mb.slot])
        if self.nxt is not None:
            dist.send(out.detach(), self.nxt)
        return True

    def backward(self, mb_id: int) -> None:
        mb = self.live[mb_id]
        act = self.slab[mb.slot]
        grad = self.module.backward_from(act)
        if self.prev is not None:
            dist.send(grad, self.prev)
        self.retire(mb_id)

    def forward_eval(self, mb: MicroBatch) -> torch.Tensor | None:
        slot = self.slots.claim()  # leak: stays set when this is the last stage
        if slot == NO_SLOT:
            raise RuntimeError("eval ran out of slots")
        dist.recv(self.slab[slot], self.prev)
        out = self.module(self.slab[slot])
        if self.nxt is None:
            return out
        dist.send(out, self.nxt)
        self.slots.vacate(slot)
        return None

    def probe(self, tokens: torch.Tensor) -> float:
        slot = self.slots.claim()  # clean: vacated before the value is returned
        if slot == NO_SLOT:
            return 0.0
        self.slab[slot].copy_(self.module.embed(tokens))
        value = self.module(self.slab[slot]).float().mean().item()
        self.slots.vacate(slot)
        return value

    def recompute(self, mb: MicroBatch) -> None:
        """Rebuild the activation of a micro-batch beside its slot."""
        mb.re_slot = self.slots.claim()  # leak: a second recompute overwrites the number of the first slot
        if mb.re_slot != NO_SLOT:
            self.slab[mb.re_slot].copy_(self.module.embed(mb.tokens))

    def relocate(self, mb: MicroBatch) -> bool:
        fresh = self.slots.claim()  # clean: near miss, the old slot is vacated and the micro-batch owns the new one
        if fresh == NO_SLOT:
            return False
        old, mb.slot = mb.slot, fresh
        if old != NO_SLOT:
            self.slab[fresh].copy_(self.slab[old])
            self.slots.vacate(old)
        self.live[mb.mb_id] = mb
        return True

    # -- both slabs -------------------------------------------------------------

    def reserve(self, mb: MicroBatch) -> bool:
        a = self.slots.claim()  # leak: kept set when the gradient slab is full
        if a == NO_SLOT:
            return False
        g = self.grad_slots.claim()  # clean: put on the micro-batch with its activation slot, retire() ends both
        if g == NO_SLOT:
            logger.debug("no gradient slot for mb %d", mb.mb_id)
            return False
        mb.slot, mb.grad_slot = a, g
        self.live[mb.mb_id] = mb
        return True

    def try_reserve(self, mb: MicroBatch) -> bool:
        a = self.slots.claim()  # clean: near miss, vacated under the combined test when only one was got
        g = self.grad_slots.claim()  # clean: near miss, vacated under the combined test when only one was got
        if a == NO_SLOT or g == NO_SLOT:
            if a != NO_SLOT:
                self.slots.vacate(a)
            if g != NO_SLOT:
                self.grad_slots.vacate(g)
            return False
        mb.slot, mb.grad_slot = a, g
        self.live[mb.mb_id] = mb
        return True

    def retire(self, mb_id: int) -> None:
        mb = self.live.pop(mb_id, None)
        if mb is None:
            return
        if mb.slot != NO_SLOT:
            self.slots.vacate(mb.slot)
        if mb.grad_slot != NO_SLOT:
            self.grad_slots.vacate(mb.grad_slot)
        if mb.re_slot != NO_SLOT:
            self.slots.vacate(mb.re_slot)
        mb.slot = mb.grad_slot = mb.re_slot = NO_SLOT

    def wgrad_step(self, mb: MicroBatch) -> None:
        g = self.grad_slots.claim()  # leak: in cooldown nobody vacates it when keep_grads is set
        if g == NO_SLOT:
            return
        self.grad_slab[g].copy_(self.module.wgrad(mb.tokens))
        self.module.accumulate(self.grad_slab[g])
        if self.phase is Phase.COOLDOWN and self.keep_grads:
            logger.info("kept gradients of mb %d", mb.mb_id)
            return
        self.grad_slots.vacate(g)

    # -- schedule ---------------------------------------------------------------

    def warmup(self, batches: Iterator[MicroBatch], depth: int) -> int:
        done = 0
        while done < depth:
            slot = self.slots.claim()  # leak: the iterator is exhausted after the slot was claimed
            if slot == NO_SLOT:
                break
            mb = next(batches, None)
            if mb is None:
                break
            mb.slot = slot
            self.live[mb.mb_id] = mb
            done += 1
        return done

    def fill(self, batches: Iterator[MicroBatch], depth: int) -> int:
        done = 0
        for mb in batches:
            if done == depth:
                break
            slot = self.slots.claim()  # clean: owned by the micro-batch in live until retire()
            if slot == NO_SLOT:
                break
            mb.slot = slot
            self.live[mb.mb_id] = mb
            done += 1
        return done

    def drain(self) -> None:
        for mb_id in sorted(self.live):
            self.backward(mb_id)
        assert self.slots.busy() == 0

    def dry_run(self, n: int) -> int:
        got = []
        for _ in range(n):
            slot = self.slots.claim()  # clean: collected in got and vacated in the loop below
            if slot == NO_SLOT:
                break
            got.append(slot)
        for slot in got:
            self.slots.vacate(slot)
        return len(got)

    def abort(self) -> None:
        self.live.clear()
        self.slots.vacate_all()
        self.grad_slots.vacate_all()
