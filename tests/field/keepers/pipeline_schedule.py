"""1F1B pipeline stage with activation slots and point-to-point receive tickets."""
from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist


class SlotTable:
    """Activation slots; a slot number stands for one preallocated boundary tensor."""

    def __init__(self, slots: int, shape: Tuple[int, ...], device: str) -> None:
        self.tensors = [torch.empty(shape, device=device) for _ in range(slots)]
        self.busy = [False] * slots

    def claim(self) -> int:
        for i, taken in enumerate(self.busy):
            if not taken:
                self.busy[i] = True
                return i
        return -1

    def unclaim(self, slot: int) -> None:
        self.busy[slot] = False


class TicketBox:
    """Bounds how many receives may be outstanding towards one peer."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.outstanding = 0
        self._serial = 0

    def draw(self) -> Optional[int]:
        if self.outstanding >= self.limit:
            return None
        self.outstanding += 1
        self._serial += 1
        return self._serial

    def hand_in(self, ticket: int) -> None:
        self.outstanding -= 1


class PipelineStage:
    def __init__(self, module: Any, prev_rank: Optional[int], next_rank: Optional[int],
                 slots: SlotTable, tickets: TicketBox) -> None:
        self.module = module
        self.prev_rank = prev_rank
        self.next_rank = next_rank
        self.slots = slots
        self.tickets = tickets
        self.saved: "OrderedDict[int, Dict[str, Any]]" = OrderedDict()
        self.pending: Deque[Dict[str, Any]] = deque()
        self.grads: Dict[int, int] = {}

    def post_recv(self, mb: int) -> bool:
        ticket = self.tickets.draw()  # clean: near miss, handed in on the slotless way, else by complete_recv or abort
        if ticket is None:
            return False
        slot = self.slots.claim()  # clean: moves with the pending record into saved, unclaimed by backward or abort
        if slot < 0:
            self.tickets.hand_in(ticket)
            return False
        work = dist.irecv(self.slots.tensors[slot], src=self.prev_rank)
        self.pending.append({"mb": mb, "slot": slot, "ticket": ticket, "work": work})
        return True

    def complete_recv(self) -> Optional[int]:
        if not self.pending:
            return None
        rec = self.pending.popleft()
        rec["work"].wait()
        self.tickets.hand_in(rec["ticket"])
        self.saved[rec["mb"]] = {"slot": rec["slot"], "out": None}
        return rec["mb"]

    def feed(self, mb: int, batch: torch.Tensor) -> bool:
        slot = self.slots.claim()  # clean: saved under its micro-batch, unclaimed by backward
        if slot < 0:
            return False
        self.slots.tensors[slot].copy_(batch)
        self.saved[mb] = {"slot": slot, "out": None}
        return True

    def forward(self, mb: int) -> torch.Tensor:
        rec = self.saved[mb]
        inp = self.slots.tensors[rec["slot"]].detach().requires_grad_()
        rec["inp"] = inp
        rec["out"] = self.module(inp)
        if self.next_rank is not None:
            dist.send(rec["out"].detach(), dst=self.next_rank)
        return rec["out"]

    def recv_grad(self, mb: int) -> bool:
        ticket = self.tickets.draw()  # leak: not handed in when there is no slot for the gradient
        if ticket is None:
            return False
        slot = self.slots.claim()  # clean: noted in grads, which backward and abort unclaim
        if slot < 0:
            return False
        dist.recv(self.slots.tensors[slot], src=self.next_rank)
        self.tickets.hand_in(ticket)
        self.grads[mb] = slot
        return True

    def backward(self, mb: int) -> None:
        rec = self.saved.pop(mb)
        gslot = self.grads.pop(mb, -1)
        if gslot >= 0:
            rec["out"].backward(self.slots.tensors[gslot])
            self.slots.unclaim(gslot)
        else:
            rec["out"].sum().backward()
        self.slots.unclaim(rec["slot"])

    def eval_step(self, batches: List[torch.Tensor]) -> List[torch.Tensor]:
        outs: List[torch.Tensor] = []
        for batch in batches:
            slot = self.slots.claim()  # leak: an empty batch ends the loop while its slot is claimed
            if slot < 0:
                outs.append(self.module(batch))
                continue
            if batch.shape[0] == 0:
                break
            inp = self.slots.tensors[slot]
            inp.copy_(batch)
            outs.append(self.module(inp).clone())
            self.slots.unclaim(slot)
        return outs

    def warm_up(self, batches: List[torch.Tensor]) -> int:
        used: List[int] = []
        for batch in batches:
            slot = self.slots.claim()  # clean: near miss, all in used are unclaimed after the break too
            if slot < 0:
                break
            used.append(slot)
            self.slots.tensors[slot].copy_(batch)
            self.module(self.slots.tensors[slot])
        for slot in used:
            self.slots.unclaim(slot)
        return len(used)

    def recompute(self, mb: int) -> Optional[torch.Tensor]:
        rec = self.saved.get(mb)
        slot = self.slots.claim()  # leak: kept when the micro-batch is not known
        if slot < 0 or rec is None:
            return None
        copy = self.slots.tensors[slot]
        copy.copy_(self.slots.tensors[rec["slot"]])
        out = self.module(copy)
        self.slots.unclaim(slot)
        return out

    def abort(self) -> None:
        while self.pending:
            rec = self.pending.popleft()
            self.tickets.hand_in(rec["ticket"])
            self.slots.unclaim(rec["slot"])
        for rec in self.saved.values():
            self.slots.unclaim(rec["slot"])
        for slot in self.grads.values():
            self.slots.unclaim(slot)
        self.saved.clear()
        self.grads.clear()


class InterleavedStage(PipelineStage):
    """Adds parked micro-batches for the second model chunk."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parked: Dict[int, int] = {}
        self.loaned: Dict[int, int] = {}

    def park(self, mb: int, hidden: torch.Tensor) -> bool:
        slot = self.slots.claim()  # leak: abort of this class empties parked without unclaiming
        if slot < 0:
            return False
        self.slots.tensors[slot].copy_(hidden)
        self.parked[mb] = slot
        return True

    def unpark(self, mb: int) -> torch.Tensor:
        slot = self.parked.pop(mb)
        hidden = self.slots.tensors[slot].clone()
        self.slots.unclaim(slot)
        return hidden

    def loan(self, mb: int) -> Optional[torch.Tensor]:
        slot = self.loaned.get(mb, -1)
        if slot < 0:
            slot = self.slots.claim()  # clean: near miss, abort unclaims what is still in loaned
            if slot < 0:
                return None
            self.loaned[mb] = slot
        return self.slots.tensors[slot]

    def settle(self, mb: int) -> None:
        slot = self.loaned.pop(mb, -1)
        if slot >= 0:
            self.slots.unclaim(slot)

    def abort(self) -> None:
        for mb in list(self.loaned):
            self.settle(mb)
        self.parked.clear()
        super().abort()
