"""One stage of a 1F1B pipeline schedule.

Activations received from the previous stage and gradients received from the
next one live in recv slots.  A slot stays with its micro-batch from the
forward until the backward of that micro-batch has run.
"""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Optional

import torch
import torch.distributed as dist

log = logging.getLogger("pipe")


class RecvSlots:
    """Preallocated receive tensors of one shape; a counter limits the window."""

    def __init__(self, shape: tuple[int, ...], window: int, device: torch.device):
        self.shape = shape
        self._tensors = [torch.empty(shape, device=device) for _ in range(window)]
        self._stack = list(range(window))
        self._where = {t.data_ptr(): i for i, t in enumerate(self._tensors)}

    @property
    def room(self) -> int:
        return len(self._stack)

    def reserve(self) -> Optional[torch.Tensor]:
        if not self._stack:
            return None
        return self._tensors[self._stack.pop()]  # clean: the tensor of this index is returned

    def reserve_zeroed(self) -> torch.Tensor:
        t = self.reserve()  # clean: returned to the caller after zeroing, None-checked
        if t is None:
            raise RuntimeError("pipeline window exceeded")
        return t.zero_()

    def free(self, t: torch.Tensor) -> None:
        self._stack.append(self._where[t.data_ptr()])


@dataclass
class MicroBatch:
    index: int
    x: Optional[torch.Tensor] = None
    y: Optional[torch.Tensor] = None
    x_from_slot: bool = False
    grad: Optional[torch.Tensor] = None


class Stage:
    def __init__(
        self,
        module: torch.nn.Module,
        acts: RecvSlots,
        grads: RecvSlots,
        rank: int,
        world: int,
        loss_fn: Optional[Callable[[torch.Tensor], torch.Tensor]] = None,
    ):
        self.module = module
        self.acts = acts
        self.grads = grads
        self.rank = rank
        self.world = world
        self.loss_fn = loss_fn
        self.alive: dict[int, MicroBatch] = {}
        self.last_loss = 0.0
        self.spare: Optional[torch.Tensor] = None
        self.shadow: Optional[torch.Tensor] = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world - 1

    def forward(self, index: int, local: Optional[torch.Tensor] = None) -> torch.Tensor:
        mb = MicroBatch(index)
        if self.is_first:
            mb.x = local
        else:
            mb.x = self.acts.reserve_zeroed()  # clean: kept in the micro-batch, freed by backward() when x_from_slot
            mb.x_from_slot = True
            dist.recv(mb.x, src=self.rank - 1)
        self.alive[index] = mb
        mb.y = self.module(mb.x.detach().requires_grad_())
        if not self.is_last:
            dist.send(mb.y.detach(), dst=self.rank + 1)
        return mb.y

    def backward(self, index: int) -> None:
        mb = self.alive.pop(index)
        if self.is_last:
            loss = self.loss_fn(mb.y)
            self.last_loss = float(loss.detach())
            loss.backward()
        else:
            g = self.grads.reserve_zeroed()  # clean: freed after the backward
            dist.recv(g, src=self.rank + 1)
            mb.y.backward(g)
            self.grads.free(g)
        if mb.x_from_slot:
            self.acts.free(mb.x)

    def forward_only(self, n: int, local: list[torch.Tensor]) -> list[torch.Tensor]:
        outs = []
        for i in range(n):
            if self.is_first:
                x = local[i]
            else:
                x = self.acts.reserve_zeroed()  # clean: near miss, freed under the same is_first guard
                dist.recv(x, src=self.rank - 1)
            with torch.no_grad():
                y = self.module(x)
            if self.is_last:
                outs.append(y.clone())
            else:
                dist.send(y, dst=self.rank + 1)
            if not self.is_first:
                self.acts.free(x)
        return outs

    def profile(self, n: int) -> float:
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(n):
            x = self.acts.reserve_zeroed()  # leak: freed only on the last stage
            y = self.module(x)
            if self.is_last:
                self.loss_fn(y)
                self.acts.free(x)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / n

    def recv_weight_grad(self, index: int) -> Optional[torch.Tensor]:
        """Split backward: keep the incoming gradient for the weight pass."""
        mb = self.alive.get(index)
        g = self.grads.reserve()  # leak: kept when the micro-batch is gone already
        if g is None:
            return None
        if mb is None:
            log.error("micro-batch %d unknown", index)
            return None
        dist.recv(g, src=self.rank + 1)
        if mb.grad is not None:
            self.grads.free(mb.grad)
        mb.grad = g
        return g

    def weight_pass(self, index: int) -> bool:
        mb = self.alive.get(index)
        if mb is None or mb.grad is None:
            return False
        mb.y.backward(mb.grad)
        self.grads.free(mb.grad)
        mb.grad = None
        return True

    def pull_spare(self) -> torch.Tensor:
        """A slot for out-of-schedule activations, fetched once."""
        if self.spare is None:
            self.spare = self.acts.reserve_zeroed()  # clean: near miss, taken only while self.spare is None, freed in reset()
        return self.spare

    def renew_shadow(self, y: torch.Tensor) -> None:
        """Keep a copy of the newest output for the divergence check."""
        self.shadow = self.acts.reserve_zeroed()  # leak: the second call rebinds self.shadow and drops the earlier slot
        self.shadow.copy_(y.detach())

    def flush(self) -> None:
        for mb in self.alive.values():
            if mb.x_from_slot:
                self.acts.free(mb.x)
            if mb.grad is not None:
                self.grads.free(mb.grad)
        self.alive.clear()

    def reset(self) -> None:
        self.flush()
        if self.spare is not None:
            self.acts.free(self.spare)
            self.spare = None
        if self.shadow is not None:
            self.acts.free(self.shadow)
            self.shadow = None


def exchange(stage: Stage, peer: int, y: torch.Tensor) -> Optional[torch.Tensor]:
    """Swap activations with the peer of an interleaved schedule."""
    slot = stage.acts.reserve()  # clean: near miss, freed when the peer declines, else returned
    if slot is None:
        return None
    flag = torch.zeros(1, device=slot.device)
    dist.recv(flag, src=peer)
    if not flag.item():
        stage.acts.free(slot)
        return None
    reqs = dist.batch_isend_irecv([dist.P2POp(dist.isend, y, peer), dist.P2POp(dist.irecv, slot, peer)])
    for req in reqs:
        req.wait()
    return slot


def exchange_norm(stage: Stage, peer: int, y: torch.Tensor) -> float:
    got = exchange(stage, peer, y)  # leak: the norm is taken and the slot dropped
    return 0.0 if got is None else float(got.norm())


def exchange_copy(stage: Stage, peer: int, y: torch.Tensor) -> Optional[torch.Tensor]:
    got = exchange(stage, peer, y)  # clean: copied and freed, None-checked
    if got is None:
        return None
    out = got.clone()
    stage.acts.free(got)
    return out


def run_1f1b(stage: Stage, n: int, inputs: list[torch.Tensor]) -> float:
    warm = min(stage.world - stage.rank - 1, n)
    for i in range(warm):
        stage.forward(i, inputs[i] if stage.is_first else None)
    for i in range(warm, n):
        stage.forward(i, inputs[i] if stage.is_first else None)
        stage.backward(i - warm)
    for i in range(n - warm, n):
        stage.backward(i)
    return stage.last_loss


def broadcast_tied(stage: Stage, weight: torch.Tensor, group, owners: set[int]) -> None:
    a = stage.acts.reserve_zeroed()  # leak: a missing grad slot returns without freeing it
    b = stage.grads.reserve()  # clean: freed with the sum, None-checked
    if b is None:
        return
    if stage.rank in owners:
        a.view(-1)[:weight.numel()].copy_(weight.view(-1))
        b.copy_(a)
    dist.all_reduce(b, group=group)
    weight.view(-1).copy_(b.view(-1)[:weight.numel()])
    stage.grads.free(b)
    stage.acts.free(a)
