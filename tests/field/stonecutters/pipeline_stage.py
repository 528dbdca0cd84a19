"""One pipeline stage under a 1F1B schedule.

Activation memory is pre-carved into slots; a bitmap keeps track of those in use.
The scheduler treats SlotsExhausted as back-pressure and tries the micro-batch
again on its next tick.
"""
from __future__ import annotations

import enum
import logging
import queue
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import torch

log = logging.getLogger(__name__)


class SlotsExhausted(RuntimeError):
    pass


class SlotBitmap:
    def __init__(self, name: str, count: int, slot_shape, device):
        self.name = name
        self._bits = (1 << count) - 1
        self.store = torch.empty((count, *slot_shape), device=device)

    def claim(self) -> int:
        if not self._bits:
            raise SlotsExhausted(self.name)
        low = self._bits & -self._bits
        self._bits ^= low
        return low.bit_length() - 1

    def vacate(self, index: int) -> None:
        self._bits |= 1 << index

    def claim_run(self, count: int) -> List[int]:
        got: List[int] = []
        try:
            while len(got) < count:
                got.append(self.claim())  # clean: vacated in the except arm, else handed to the caller
        except SlotsExhausted:
            for index in got:
                self.vacate(index)
            raise
        return got


class TagPool:
    """Message tags for point-to-point traffic; one in flight per tag."""

    def __init__(self, first: int, count: int):
        self._q: "queue.SimpleQueue[int]" = queue.SimpleQueue()
        for tag in range(first, first + count):
            self._q.put(tag)

    def checkout(self) -> int:
        return self._q.get()

    def checkin(self, tag: int) -> None:
        self._q.put(tag)


class Phase(enum.Enum):
    WARMUP = 0
    STEADY = 1
    COOLDOWN = 2


@dataclass
class MicroBatch:
    mb_id: int
    tensor: torch.Tensor
    chunk: int = 0
    meta: Dict[str, Any] = field(default_factory=dict)


class PipelineStage:
    def __init__(self, module, acts: SlotBitmap, outs: SlotBitmap, tags: TagPool, link):
        self.module = module
        self.acts = acts
        self.outs = outs
        self.tags = tags
        self.link = link
        self.stash: Dict[int, Tuple[int, int]] = {}
        self.virtual: Dict[int, int] = {}
        self.latest: Dict[int, int] = {}
        self.phase = Phase.WARMUP

    # -- schedule ---------------------------------------------------------

    def tick(self, mb: MicroBatch) -> bool:
        try:
            self.forward(mb)
        except SlotsExhausted as exc:
            log.debug("stage is full (%s), micro-batch %d waits", exc, mb.mb_id)
            return False
        return True

    def forward(self, mb: MicroBatch) -> torch.Tensor:
        in_slot = self.acts.claim()  # leak: outs.claim() may raise SlotsExhausted with no rollback
        out_slot = self.outs.claim()  # clean: near miss, moved into stash, vacated by backward()
        self.acts.store[in_slot].copy_(mb.tensor)
        out = self.module(self.acts.store[in_slot])
        self.outs.store[out_slot].copy_(out)
        self.stash[mb.mb_id] = (in_slot, out_slot)
        return self.outs.store[out_slot]

    def backward(self, mb_id: int, grad: torch.Tensor) -> torch.Tensor:
        in_slot, out_slot = self.stash.pop(mb_id)
        self.outs.store[out_slot].backward(grad)
        result = self.acts.store[in_slot].grad
        self.acts.vacate(in_slot)
        self.outs.vacate(out_slot)
        return result

    def forward_only(self, mb: MicroBatch) -> Optional[torch.Tensor]:
        try:
            in_slot = self.acts.claim()  # clean: vacated on both the exhausted and the ordinary way
        except SlotsExhausted:
            return None
        try:
            out_slot = self.outs.claim()  # clean: vacated after the clone
        except SlotsExhausted:
            self.acts.vacate(in_slot)
            return None
        self.acts.store[in_slot].copy_(mb.tensor)
        with torch.no_grad():
            self.outs.store[out_slot].copy_(self.module(self.acts.store[in_slot]))
        result = self.outs.store[out_slot].clone()
        self.outs.vacate(out_slot)
        self.acts.vacate(in_slot)
        return result

    def warm_up(self, batches: List[MicroBatch], depth: int) -> List[int]:
        slots = self.outs.claim_run(depth)  # leak: slots past the last micro-batch are in no table
        started = []
        for slot, mb in zip(slots, batches):
            self.outs.store[slot].copy_(self.module(mb.tensor))
            self.latest[mb.mb_id] = slot
            started.append(mb.mb_id)
        return started

    def cool_down(self) -> None:
        self.phase = Phase.COOLDOWN
        for slot in self.latest.values():
            self.outs.vacate(slot)
        self.latest.clear()
        for slot in self.virtual.values():
            self.outs.vacate(slot)
        self.virtual.clear()

    # -- interleaved chunks -----------------------------------------------

    def run_chunk(self, mb: MicroBatch) -> torch.Tensor:
        slot = self.outs.claim()  # leak: the same chunk's older slot is overwritten in the virtual table
        self.outs.store[slot].copy_(self.module(mb.tensor))
        self.virtual[mb.chunk] = slot
        return self.outs.store[slot]

    def refresh_latest(self, mb: MicroBatch) -> torch.Tensor:
        slot = self.outs.claim()  # clean: near miss, the older slot is vacated before the table entry changes
        older = self.latest.pop(mb.mb_id, None)
        if older is not None:
            self.outs.vacate(older)
        self.outs.store[slot].copy_(self.module(mb.tensor))
        self.latest[mb.mb_id] = slot
        return self.outs.store[slot]

    # -- links ------------------------------------------------------------

    def send_with_retry(self, payload: torch.Tensor, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            tag = self.tags.checkout()  # leak: a refused send goes round with a new tag
            if self.link.send(payload, tag):
                self.tags.checkin(tag)
                return True
            log.info("send attempt %d refused", attempt)
        return False

    def recv_with_retry(self, into: torch.Tensor, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            tag = self.tags.checkout()  # clean: checked in before the result is looked at
            ok = self.link.recv(into, tag)
            self.tags.checkin(tag)
            if ok:
                return True
            log.info("receive attempt %d refused", attempt)
        return False

    def send_async(self, payload: torch.Tensor):
        tag = self.tags.checkout()  # clean: near miss, the completion callback checks it in
        fut = self.link.isend(payload, tag)
        fut.add_done_callback(lambda _f, tag=tag: self.tags.checkin(tag))
        return fut

    def exchange(self, payload: torch.Tensor, into: torch.Tensor, bidirectional: bool) -> None:
        send_tag = self.tags.checkout()  # clean: checked in in finally
        recv_tag = self.tags.checkout() if bidirectional else None  # clean: near miss, None unless bidirectional, tested in finally
        try:
            self.link.send(payload, send_tag)
            if recv_tag is not None:
                self.link.recv(into, recv_tag)
        finally:
            self.tags.checkin(send_tag)
            if recv_tag is not None:
                self.tags.checkin(recv_tag)


class FlushWindow:
    """Holds one output slot as scratch while the stage drains."""

    def __init__(self, stage: PipelineStage):
        self.stage = stage
        self.slot: Optional[int] = None

    def __enter__(self):
        self.slot = self.stage.outs.claim()  # leak: __exit__ returns early when the body raised
        return self.stage.outs.store[self.slot]

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            log.error("flush interrupted: %s", exc)
            return False
        self.stage.outs.vacate(self.slot)
        self.slot = None
        return False


class ReplayWindow:
    """Recomputes one micro-batch in a borrowed activation slot."""

    def __init__(self, stage: PipelineStage, mb: MicroBatch):
        self.stage = stage
        self.mb = mb
        self.slot: Optional[int] = None

    def __enter__(self):
        self.slot = self.stage.acts.claim()  # clean: near miss, __exit__ vacates before its early return
        self.stage.acts.store[self.slot].copy_(self.mb.tensor)
        return self.stage.acts.store[self.slot]

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.stage.acts.vacate(self.slot)
        self.slot = None
        if exc_type is not None:
            return issubclass(exc_type, StopIteration)
        return False


def drain(stage: PipelineStage, batches) -> List[torch.Tensor]:
    outs = []
    for mb in batches:
        with ReplayWindow(stage, mb) as act:  # clean: the with block vacates the slot
            outs.append(stage.module(act).detach().clone())
    return outs
