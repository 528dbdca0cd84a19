"""One pipeline stage: receives, computes, stashes, sends."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from .buffers import P2PBuffers, Shape, SlotTable


@dataclass
class Stashed:
    slot: int
    output: torch.Tensor
    needs_grad: bool = True


class Stage:
    def __init__(self, module, index: int, n_stages: int, shape: Shape, table: SlotTable, p2p: P2PBuffers):
        self.module = module
        self.index = index
        self.n_stages = n_stages
        self.shape = shape
        self.table = table
        self.p2p = p2p
        self._stash: Dict[int, Stashed] = {}
        self._sends: List[Tuple[object, torch.Tensor]] = []

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.n_stages - 1

    # ---- communication --------------------------------------------------------------------

    def recv_from(self, peer: int) -> torch.Tensor:
        buf = self.p2p.checkout(self.shape)  # clean: handed to the caller
        dist.recv(buf, src=peer)
        return buf

    def send_async(self, data: torch.Tensor, peer: int) -> None:
        buf = self.p2p.checkout(self.shape)  # clean: near miss, drain_sends() checks it in
        buf.copy_(data)
        self._sends.append((dist.isend(buf, dst=peer), buf))

    def drain_sends(self) -> None:
        pending, self._sends = self._sends, []
        for work, buf in pending:
            work.wait()
            self.p2p.checkin(buf)

    # ---- compute --------------------------------------------------------------------------

    def forward_one(self, mb: int, batch: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        slot = self.table.claim()  # clean: stashed, backward_one() and abandon() vacate it
        if slot == SlotTable.NONE:
            return None
        kept = self.table.view(slot)
        if self.is_first:
            kept.copy_(batch)
        else:
            arrived = self.recv_from(self.index - 1)  # clean: checked in after the copy
            kept.copy_(arrived)
            self.p2p.checkin(arrived)
        out = self.module(kept.detach().requires_grad_())
        self._stash[mb] = Stashed(slot, out)
        if not self.is_last:
            self.send_async(out.detach(), self.index + 1)
        return out

    def backward_one(self, mb: int) -> None:
        entry = self._stash.pop(mb)
        if self.is_last:
            entry.output.mean().backward()
        else:
            grad = self.recv_from(self.index + 1)  # leak: used for backward, not checked in
            entry.output.backward(grad)
        self.table.vacate(entry.slot)

    def abandon(self) -> int:
        """Give up all micro-batches in flight (a restart was asked for)."""
        n = len(self._stash)
        while self._stash:
            _, entry = self._stash.popitem()
            self.table.vacate(entry.slot)
        self.drain_sends()
        return n

    def evaluate_one(self, batch: Optional[torch.Tensor], metric=None) -> Optional[float]:
        if self.is_first:
            out = self.module(batch)
            self.send_async(out, 1)
            return None
        arrived = self.recv_from(self.index - 1)  # leak: the middle stages return before the checkin
        out = self.module(arrived)
        if not self.is_last:
            self.send_async(out, self.index + 1)
            return None
        score = float(metric(out)) if metric is not None else float(out.mean())
        self.p2p.checkin(arrived)
        return score


class RecomputeStage(Stage):
    """Keeps only inputs; the output is computed again before backward."""

    def __init__(self, *args, **kw) -> None:
        super().__init__(*args, **kw)
        self._inputs: Dict[int, Stashed] = {}

    def forward_one(self, mb: int, batch: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        slot = self.table.claim()  # leak: backward_one() vacates only if needs_grad, and it is stored always
        if slot == SlotTable.NONE:
            return None
        kept = self.table.view(slot)
        if batch is not None:
            kept.copy_(batch)
        with torch.no_grad():
            out = self.module(kept)
        self._inputs[mb] = Stashed(slot, out, needs_grad=self.module.training)
        return out

    def backward_one(self, mb: int) -> None:
        entry = self._inputs.pop(mb)
        if not entry.needs_grad:
            return
        again = self.module(self.table.view(entry.slot).detach().requires_grad_())
        again.mean().backward()
        self.table.vacate(entry.slot)

    def abandon(self) -> int:
        n = len(self._inputs)
        for entry in self._inputs.values():
            self.table.vacate(entry.slot)
        self._inputs.clear()
        return n
