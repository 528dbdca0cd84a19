"""One stage of a 1F1B pipeline. Activations live in a fixed table of slots until their backward."""
from __future__ import annotations

import enum
import logging
from collections import deque
from typing import Iterable, Optional, Protocol

import torch

log = logging.getLogger("pipe.stage")


class Link(Protocol):
    def send(self, tensor, tag: int) -> None: ...
    def recv(self, into, tag: int) -> bool: ...


class Op(enum.Enum):
    FORWARD = 1
    BACKWARD = 2
    IDLE = 3


class ActivationTable:
    """`depth` slots of the same shape; a slot number is the lease."""

    def __init__(self, depth: int, shape: tuple, device) -> None:
        self.tensors = [torch.empty(shape, device=device) for _ in range(depth)]
        self._vacant = deque(range(depth))
        self._owner: dict[int, int] = {}

    def claim(self, microbatch: int) -> int:
        """A slot for the microbatch, or -1 when the table is full."""
        if not self._vacant:
            return -1
        slot = self._vacant.popleft()
        self._owner[slot] = microbatch
        return slot

    def claim_or_fail(self, microbatch: int) -> int:
        slot = self.claim(microbatch)  # clean: returned, -1 is no slot
        if slot < 0:
            raise RuntimeError(f"no activation slot for microbatch {microbatch}")
        return slot

    def retire(self, slot: int) -> None:
        del self._owner[slot]
        self._vacant.append(slot)

    def __getitem__(self, slot: int):
        return self.tensors[slot]


class Stage:
    def __init__(self, index: int, last: bool, module, table: ActivationTable, up: Link, down: Link) -> None:
        self.index = index
        self.last = last
        self.module = module
        self.table = table
        self.up = up
        self.down = down
        self.saved: dict[int, int] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.stash: dict[int, int] = {}
        self.losses: list[float] = []
        self.waiting: list[tuple[int, int]] = []

    # plain 1F1B -------------------------------------------------------------------------------
    def forward(self, mb: int) -> bool:
        slot = self.table.claim(mb)  # clean: near miss, saved[mb] until backward retires it
        if slot < 0:
            log.debug("stage %d is full at microbatch %d", self.index, mb)
            return False
        if not self.up.recv(self.table[slot], tag=mb):
            self.table.retire(slot)
            return False
        out = self.module(self.table[slot])
        self.outputs[mb] = out
        if not self.last:
            self.down.send(out, tag=mb)
        self.saved[mb] = slot
        return True

    def backward(self, mb: int, grad) -> None:
        slot = self.saved.pop(mb)
        out = self.outputs.pop(mb)
        out.backward(grad)
        self.up.send(self.table[slot].grad, tag=mb)
        self.table.retire(slot)

    def forward_eval(self, mb: int) -> Optional[torch.Tensor]:
        """Forward without a backward to follow."""
        slot = self.table.claim(mb)  # leak: the last stage returns before retire
        if slot < 0:
            return None
        self.up.recv(self.table[slot], tag=mb)
        with torch.no_grad():
            out = self.module(self.table[slot])
        if self.last:
            self.losses.append(float(out.mean()))
            return out.clone()
        self.down.send(out, tag=mb)
        self.table.retire(slot)
        return None

    # split backward: weight grads are deferred ------------------------------------------------
    def split_backward(self, mb: int, grad, defer: bool) -> None:
        """Input gradient now; the weight gradient now or later."""
        copy = -1
        if defer:
            copy = self.table.claim_or_fail(mb)  # clean: near miss, same flag stashes it for flush
            self.table[copy].copy_(grad)
        out = self.outputs[mb]
        gin = torch.autograd.grad(out, self.table[self.saved[mb]], grad, retain_graph=defer)[0]
        self.up.send(gin, tag=mb)
        if defer:
            self.stash[mb] = copy
        else:
            self.table.retire(self.saved.pop(mb))

    def flush_weight_grads(self) -> None:
        for mb in sorted(self.stash):
            slot = self.stash[mb]
            torch.autograd.backward(self.outputs.pop(mb), self.table[slot])
            self.table.retire(slot)
            self.table.retire(self.saved.pop(mb))
        self.stash.clear()

    def park(self, mb: int, tensor) -> None:
        """Keep a tensor that arrived before its turn."""
        slot = self.table.claim_or_fail(mb)  # leak: drain_waiting drops the slot numbers
        self.table[slot].copy_(tensor)
        self.waiting.append((mb, slot))

    def drain_waiting(self) -> list:
        ready = []
        for mb, slot in sorted(self.waiting):
            ready.append((mb, self.table[slot].clone()))
        self.waiting.clear()
        return ready


class InterleavedStage(Stage):
    """Several model chunks on one rank."""

    def __init__(self, chunks: list, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.chunks = chunks
        self.per_chunk: list[deque] = [deque() for _ in chunks]

    def run_chunk(self, c: int, mb: int) -> torch.Tensor:
        slot = self.table.claim_or_fail(mb)  # clean: queued, pop_chunk retires it
        self.up.recv(self.table[slot], tag=mb * len(self.chunks) + c)
        out = self.chunks[c](self.table[slot])
        self.per_chunk[c].append(slot)
        return out

    def pop_chunk(self, c: int, grad) -> torch.Tensor:
        slot = self.per_chunk[c].popleft()
        gin = self.table[slot].grad * grad.norm()
        self.table.retire(slot)
        return gin

    def warm_up(self, order: Iterable[tuple[int, int]]) -> int:
        ran = 0
        for c, mb in order:
            slot = self.table.claim(mb)  # leak: break on a silent link keeps the slot
            if slot < 0:
                break
            if not self.up.recv(self.table[slot], tag=mb):
                break
            self.chunks[c](self.table[slot])
            self.per_chunk[c].append(slot)
            ran += 1
        return ran

    def pair(self, mb: int) -> Optional[tuple[int, int]]:
        """Two slots or none."""
        first = self.table.claim(mb)  # clean: both are returned, or this one is rolled back
        if first < 0:
            return None
        second = self.table.claim(mb)  # clean: both are returned
        if second < 0:
            self.table.retire(first)
            return None
        return first, second

    def exchange(self, mb: int) -> float:
        got = self.pair(mb)  # leak: the second slot of the pair is not retired
        if got is None:
            return 0.0
        mine, theirs = got
        self.up.recv(self.table[theirs], tag=mb)
        self.table[mine].copy_(self.module(self.table[theirs]))
        self.down.send(self.table[mine], tag=mb)
        drift = float((self.table[mine] - self.table[theirs]).abs().max())
        self.table.retire(mine)
        return drift

    def mirror(self, mb: int) -> float:
        got = self.pair(mb)  # clean: both halves are retired
        if got is None:
            return 0.0
        a, b = got
        self.up.recv(self.table[a], tag=mb)
        self.table[b].copy_(self.table[a])
        drift = float((self.table[a] - self.module(self.table[b])).abs().max())
        for slot in got:
            self.table.retire(slot)
        return drift


def schedule(stage: Stage, total: int, warm: int) -> list[Op]:
    trace, fwd, bwd = [], 0, 0
    while bwd < total:
        if fwd < total and fwd - bwd <= warm and stage.forward(fwd):
            trace.append(Op.FORWARD)
            fwd += 1
        elif bwd < fwd:
            stage.backward(bwd, torch.ones(()))
            trace.append(Op.BACKWARD)
            bwd += 1
        else:
            trace.append(Op.IDLE)
    return trace
