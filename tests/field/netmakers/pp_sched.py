"""1F1B pipeline schedule. Activation slots come from a fixed bitmap per stage."""
from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class SlotMap:
    """Slot numbers tracked in an int bitmap. claim() returns -1 when all are taken."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._bits = (1 << n) - 1

    def claim(self) -> int:
        if not self._bits:
            return -1
        low = self._bits & -self._bits
        self._bits ^= low
        return low.bit_length() - 1

    def claim_many(self, count: int) -> list[int]:
        got: list[int] = []
        for _ in range(count):
            s = self.claim()  # clean: near miss, a short grab is vacated before the empty list is returned
            if s < 0:
                for x in got:
                    self.vacate(x)
                return []
            got.append(s)
        return got

    def vacate(self, slot: int) -> None:
        self._bits |= 1 << slot

    @property
    def available(self) -> int:
        return self._bits.bit_count()


class Phase(enum.Enum):
    WARMUP = 0
    STEADY = 1
    DRAIN = 2


@dataclass
class Micro:
    index: int
    slot: int
    grad_slot: int = -1
    out: torch.Tensor | None = None
    needs_recompute: bool = False


@dataclass
class StageBuffers:
    shape: tuple[int, ...]
    depth: int
    device: torch.device
    acts: list[torch.Tensor] = field(init=False)
    grads: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.acts = [torch.empty(self.shape, device=self.device) for _ in range(self.depth)]
        self.grads = [torch.empty(self.shape, device=self.device) for _ in range(self.depth)]


class Stage:
    def __init__(self, module: Callable, bufs: StageBuffers, prev: int | None, nxt: int | None) -> None:
        self.module = module
        self.bufs = bufs
        self.prev, self.nxt = prev, nxt
        self.act_slots = SlotMap(bufs.depth)
        self.grad_slots = SlotMap(bufs.depth)
        self.inflight: deque[Micro] = deque()
        self.parked: dict[int, Micro] = {}

    def forward_one(self, index: int) -> bool:
        slot = self.act_slots.claim()  # clean: near miss, moved into inflight, vacated by backward_one or flush
        if slot < 0:
            return False
        x = self.bufs.acts[slot]
        if self.prev is not None:
            dist.recv(x, self.prev)
        out = self.module(x)
        if self.nxt is not None:
            dist.send(out.detach(), self.nxt)
        self.inflight.append(Micro(index, slot, out=out))
        return True

    def forward_eval(self, index: int) -> torch.Tensor | None:
        slot = self.act_slots.claim()  # leak: not vacated on a middle stage, which returns after the send
        if slot < 0:
            return None
        x = self.bufs.acts[slot]
        if self.prev is not None:
            dist.recv(x, self.prev)
        with torch.no_grad():
            out = self.module(x)
        if self.nxt is not None:
            dist.send(out, self.nxt)
            return None
        self.act_slots.vacate(slot)
        return out

    def backward_one(self) -> bool:
        if not self.inflight:
            return False
        g = -1
        if self.nxt is not None:
            g = self.grad_slots.claim()  # clean: near miss, vacated under the same self.nxt test
            if g < 0:
                return False
            dist.recv(self.bufs.grads[g], self.nxt)
        m = self.inflight.popleft()
        if self.nxt is not None:
            m.out.backward(self.bufs.grads[g])
        else:
            m.out.backward()
        if self.nxt is not None:
            self.grad_slots.vacate(g)
        self.act_slots.vacate(m.slot)
        if self.prev is not None:
            dist.send(self.bufs.acts[m.slot].grad, self.prev)
        return True

    def backward_deferred(self) -> Micro | None:
        """Zero-bubble: run the input half now, keep the weight half for later."""
        g = self.grad_slots.claim()  # leak: lost when nothing is in flight
        if g < 0:
            return None
        if not self.inflight:
            return None
        m = self.inflight.popleft()
        dist.recv(self.bufs.grads[g], self.nxt)
        m.grad_slot = g
        self.parked[m.index] = m
        return m

    def finish_deferred(self, index: int) -> None:
        m = self.parked.pop(index)
        m.out.backward(self.bufs.grads[m.grad_slot])
        self.grad_slots.vacate(m.grad_slot)
        self.act_slots.vacate(m.slot)

    def recompute(self, m: Micro) -> torch.Tensor | None:
        tmp = self.act_slots.claim()  # clean: vacated in finally
        if tmp < 0:
            return None
        try:
            self.bufs.acts[tmp].copy_(self.bufs.acts[m.slot])
            if not m.needs_recompute:
                return m.out
            return self.module(self.bufs.acts[tmp])
        finally:
            self.act_slots.vacate(tmp)

    def relocate(self, m: Micro) -> None:
        """Move a microbatch to the lowest free slot so that the tail can be trimmed."""
        low = self.act_slots.claim()  # leak: not vacated when the free slot is above the one in use
        if low < 0 or low > m.slot:
            return
        self.bufs.acts[low].copy_(self.bufs.acts[m.slot])
        self.act_slots.vacate(m.slot)
        m.slot = low

    def swap(self, m: Micro) -> None:
        fresh = self.act_slots.claim()  # clean: near miss, exchanged with m.slot and the old one is vacated
        if fresh < 0:
            return
        self.bufs.acts[fresh].copy_(self.bufs.acts[m.slot])
        fresh, m.slot = m.slot, fresh
        self.act_slots.vacate(fresh)

    def flush(self) -> None:
        while self.inflight:
            self.act_slots.vacate(self.inflight.pop().slot)
        for m in self.parked.values():
            self.act_slots.vacate(m.slot)
            self.grad_slots.vacate(m.grad_slot)
        self.parked.clear()


class Interleaved:
    """Several virtual stages on a rank; a step reserves a slot on each one up front."""

    def __init__(self, chunks: list[Stage]) -> None:
        self.chunks = chunks
        self.reserved: list[tuple[Stage, int]] = []

    def reserve(self) -> bool:
        for st in self.chunks:
            s = st.act_slots.claim()  # clean: near miss, unreserve() vacates what was collected when one chunk is full
            if s < 0:
                self.unreserve()
                return False
            self.reserved.append((st, s))
        return True

    def unreserve(self) -> None:
        for st, s in self.reserved:
            st.act_slots.vacate(s)
        self.reserved = []

    def reserve_both(self, st: Stage) -> tuple[int, int] | None:
        a = st.act_slots.claim()  # leak: not vacated when there is no gradient slot
        if a < 0:
            return None
        g = st.grad_slots.claim()  # clean: returned with the activation slot
        if g < 0:
            return None
        return a, g

    def dry_run(self, st: Stage) -> bool:
        both = self.reserve_both(st)  # clean: both slots vacated at once
        if both is None:
            return False
        a, g = both
        st.act_slots.vacate(a)
        st.grad_slots.vacate(g)
        return True

    def can_fit(self, st: Stage, depth: int) -> bool:
        slots = st.act_slots.claim_many(depth)  # leak: a probe whose slots are never vacated
        return len(slots) == depth

    def can_fit_now(self, st: Stage, depth: int) -> bool:
        slots = st.act_slots.claim_many(depth)  # clean: each slot vacated in the loop
        for s in slots:
            st.act_slots.vacate(s)
        return len(slots) == depth


def run_1f1b(stage: Stage, n_micro: int, warmup: int) -> None:
    sent = done = 0
    phase = Phase.WARMUP
    while done < n_micro:
        if phase is not Phase.DRAIN and stage.forward_one(sent):
            sent += 1
        if sent >= warmup:
            phase = Phase.STEADY
        if sent == n_micro:
            phase = Phase.DRAIN
        if phase is not Phase.WARMUP and stage.backward_one():
            done += 1
    if stage.inflight:
        log.warning("%d microbatches left after the last step", len(stage.inflight))
        stage.flush()
