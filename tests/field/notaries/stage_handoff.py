"""Pipeline-parallel stages: activation buffers that move between microbatches, mailboxes and peers."""
from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import torch


class ActivationArena:
    def __init__(self, shape: tuple[int, ...], count: int) -> None:
        self._spare = [torch.empty(shape) for _ in range(count)]
        self.low_water = count

    def obtain(self) -> torch.Tensor:
        act = self._spare.pop()
        self.low_water = min(self.low_water, len(self._spare))
        return act

    def recycle(self, act: torch.Tensor) -> None:
        self._spare.append(act)


class Phase(enum.Enum):
    FRESH = "fresh"
    FORWARD = "forward"
    TRANSFERRED = "transferred"
    BACKWARD = "backward"
    DONE = "done"


@dataclass
class Microbatch:
    index: int
    phase: Phase = Phase.FRESH
    inputs: torch.Tensor | None = None
    outputs: torch.Tensor | None = None
    residual: torch.Tensor | None = None


@dataclass
class Mailbox:
    """Between two neighbours; whoever collects a letter recycles its tensor."""

    arena: ActivationArena
    letters: deque[tuple[int, torch.Tensor]] = field(default_factory=deque)

    def deliver(self, index: int, act: torch.Tensor) -> None:
        self.letters.append((index, act))

    def flush(self) -> int:
        count = len(self.letters)
        for _, act in self.letters:
            self.arena.recycle(act)
        self.letters.clear()
        return count


class InteriorStage:
    """Receives from the left, sends outputs to the right, recycles in retire()."""

    def __init__(self, arena: ActivationArena, right: Mailbox, module) -> None:
        self.arena = arena
        self.right = right
        self.module = module
        self.live: dict[int, Microbatch] = {}

    def forward(self, index: int, source: torch.Tensor) -> Microbatch:
        mb = Microbatch(index, Phase.FORWARD)
        mb.inputs = self.arena.obtain()  # clean: near miss, retire() recycles it in every phase
        mb.outputs = self.arena.obtain()  # clean: near miss, the mailbox's when transferred, else retire()
        mb.residual = self.arena.obtain()  # leak: retire() returns at TRANSFERRED before it comes to it
        mb.inputs.copy_(source)
        mb.outputs.copy_(self.module(mb.inputs))
        mb.residual.copy_(mb.inputs).sub_(mb.outputs)
        self.live[index] = mb
        return mb

    def send(self, index: int) -> None:
        mb = self.live[index]
        self.right.deliver(index, mb.outputs)
        mb.outputs = None
        mb.phase = Phase.TRANSFERRED

    def retire(self, index: int) -> None:
        mb = self.live.pop(index)
        self.arena.recycle(mb.inputs)
        if mb.phase is Phase.TRANSFERRED:
            mb.phase = Phase.DONE
            return
        self.arena.recycle(mb.outputs)
        self.arena.recycle(mb.residual)
        mb.phase = Phase.DONE


class LastStage:
    def __init__(self, arena: ActivationArena, left: Mailbox, loss_fn) -> None:
        self.arena = arena
        self.left = left
        self.loss_fn = loss_fn
        self.grads: dict[int, torch.Tensor] = {}

    def consume(self) -> float:
        total = 0.0
        while self.left.letters:
            index, act = self.left.letters.popleft()
            grad = self.arena.obtain()  # clean: near miss, kept in grads until collect() or abort()
            total += float(self.loss_fn(act, grad))
            self.arena.recycle(act)
            self.grads[index] = grad
        return total

    def collect(self, index: int, out: torch.Tensor) -> bool:
        if (grad := self.grads.pop(index, None)) is None:
            return False
        out.copy_(grad)
        self.arena.recycle(grad)
        return True

    def abort(self) -> None:
        for grad in self.grads.values():
            self.arena.recycle(grad)
        self.grads.clear()


class ReplayStage:
    """Recomputes activations on the way back; `detached` outputs belong to the caller."""

    def __init__(self, arena: ActivationArena, module) -> None:
        self.arena = arena
        self.module = module
        self.detached = False
        self._act: torch.Tensor | None = None

    def recompute(self, source: torch.Tensor) -> torch.Tensor:
        if self._act is None:
            self._act = self.arena.obtain()  # clean: near miss, reset() recycles, or detach() hands it on
        self._act.copy_(self.module(source))
        self.detached = False
        return self._act

    def detach(self) -> torch.Tensor:
        act, self._act = self._act, None
        self.detached = True
        return act

    def reset(self) -> None:
        if self.detached or self._act is None:
            return
        self.arena.recycle(self._act)
        self._act = None


def replay_norms(stage: ReplayStage, arena: ActivationArena, sources: list[torch.Tensor]) -> list[float]:
    norms = []
    for source in sources:
        stage.recompute(source)
        act = stage.detach()  # clean: near miss, ours after detach() and recycled here
        norms.append(float(act.norm()))
        arena.recycle(act)
    stage.reset()
    return norms


def replay_max(stage: ReplayStage, sources: list[torch.Tensor]) -> float:
    best = 0.0
    for source in sources:
        stage.recompute(source)
        act = stage.detach()  # leak: ours after detach(), and reset() returns early on a detached stage
        best = max(best, float(act.abs().max()))
        stage.reset()
    return best


class EvalStage:
    """Double-buffers its inputs; swap() exchanges the halves, finish() closes."""

    def __init__(self, arena: ActivationArena, module, keep_last: bool) -> None:
        self.arena = arena
        self.module = module
        self.keep_last = keep_last
        self.front = arena.obtain()  # clean: near miss, swap() only exchanges, finish() recycles both halves
        self.back = arena.obtain()  # clean: near miss, as the front
        self.last: torch.Tensor | None = None

    def swap(self) -> None:
        self.front, self.back = self.back, self.front

    def score(self, source: torch.Tensor) -> float:
        self.back.copy_(source)
        self.swap()
        if self.keep_last:
            if self.last is not None:
                self.arena.recycle(self.last)
            self.last = self.arena.obtain()  # leak: finish() tests the flag the wrong way, keep_last keeps it
            self.last.copy_(self.front)
        return float(self.module(self.front).mean())

    def finish(self) -> None:
        self.arena.recycle(self.front)
        self.arena.recycle(self.back)
        if not self.keep_last and self.last is not None:
            self.arena.recycle(self.last)
        self.last = None
