"""1F1B pipeline stage: activation stash, link credits and recompute seeds."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch


class ActivationArena:
    def __init__(self, shape, count):
        self._idle = [torch.empty(shape, device="cuda") for _ in range(count)]

    def borrow(self) -> Optional[torch.Tensor]:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give_back(self, t: torch.Tensor) -> None:
        self._idle.append(t)


class LinkCredits:
    """Flow control to the next stage. An amount of credits is drawn and topped up again."""

    def __init__(self, total):
        self.total = self.left = total

    def draw(self, n) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def top_up(self, n) -> None:
        self.left += n


class SeedBook:
    def __init__(self, n):
        self._seeds = list(range(1000, 1000 + n))

    def issue(self) -> int:
        return self._seeds.pop()

    def revoke(self, seed: int) -> None:
        self._seeds.append(seed)


@dataclass
class Saved:
    inputs: torch.Tensor
    extras: list[torch.Tensor] = field(default_factory=list)


@dataclass
class MicroBatch:
    number: int
    saved: Optional[Saved] = None
    credits: int = 0
    seed: Optional[int] = None
    loss: float = 0.0


class Stage:
    def __init__(self, layers, arena: ActivationArena, credits: LinkCredits, seeds: SeedBook):
        self.layers = layers
        self.arena = arena
        self.credits = credits
        self.seeds = seeds
        self.in_flight: dict[int, MicroBatch] = {}
        self.eval_input: Optional[torch.Tensor] = None

    def forward(self, number: int, x: torch.Tensor, recompute: bool) -> Optional[torch.Tensor]:
        if number in self.in_flight:
            return None
        kept = self.arena.borrow()  # clean: near miss, in saved.inputs, which both ends give back
        if kept is None:
            return None
        if not self.credits.draw(2):  # leak: abort() gives back the tensors and the seed but not the credits
            self.arena.give_back(kept)
            return None
        kept.copy_(x)
        mb = MicroBatch(number, Saved(kept), credits=2)
        if recompute:
            mb.seed = self.seeds.issue()  # clean: near miss, backward and abort both revoke
            torch.manual_seed(mb.seed)
        for layer in self.layers:
            x = layer(x)
            if getattr(layer, "keeps_output", False):
                if (extra := self.arena.borrow()) is not None:  # leak: backward() drops the extras
                    extra.copy_(x)
                    mb.saved.extras.append(extra)
        self.in_flight[number] = mb
        return x

    def backward(self, number: int, grad: torch.Tensor) -> torch.Tensor:
        mb = self.in_flight.pop(number)
        if mb.seed is not None:
            torch.manual_seed(mb.seed)
        x = mb.saved.inputs.detach().requires_grad_()
        y = x
        for layer in self.layers:
            y = layer(y)
        y.backward(grad)
        out = x.grad.clone()
        self.arena.give_back(mb.saved.inputs)
        self.credits.top_up(mb.credits)
        if mb.seed is not None:
            self.seeds.revoke(mb.seed)
        return out

    def abort(self) -> int:
        """A peer went away: forget everything in flight."""
        dropped = len(self.in_flight)
        for mb in self.in_flight.values():
            for t in (mb.saved.inputs, *mb.saved.extras):
                self.arena.give_back(t)
            if mb.seed is not None:
                self.seeds.revoke(mb.seed)
        self.in_flight.clear()
        return dropped

    def evaluate(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        if self.eval_input is None:
            self.eval_input = self.arena.borrow()  # clean: near miss, end_evaluation gives it back
            if self.eval_input is None:
                return None
        self.eval_input.copy_(x)
        y = self.eval_input
        for layer in self.layers:
            y = layer(y)
        return y

    def end_evaluation(self) -> None:
        if self.eval_input is not None:
            self.arena.give_back(self.eval_input)
            self.eval_input = None


class Receiver:
    """Takes activations of the previous stage into double buffers."""

    def __init__(self, arena: ActivationArena, credits: LinkCredits):
        self.arena = arena
        self.credits = credits
        self.front: Optional[torch.Tensor] = None
        self.back: Optional[torch.Tensor] = None
        self.tags: dict[int, int] = {}

    def post(self, recv) -> bool:
        incoming = self.arena.borrow()  # clean: near miss, back then front, given back on each move
        if incoming is None:
            return False
        recv(incoming)
        if self.back is not None:
            self.arena.give_back(self.back)
        self.back = incoming
        return True

    def flip(self) -> Optional[torch.Tensor]:
        if self.back is None:
            return None
        if self.front is not None:
            self.arena.give_back(self.front)
        self.front, self.back = self.back, None
        return self.front

    def tag(self, peer: int, n: int) -> bool:
        if not self.credits.draw(n):  # leak: a second tag of the peer overwrites the amount
            return False
        self.tags[peer] = n
        return True

    def untag(self, peer: int) -> None:
        self.credits.top_up(self.tags.pop(peer, 0))

    def stop(self) -> None:
        for t in (self.front, self.back):
            if t is not None:
                self.arena.give_back(t)
        self.front = self.back = None
        for peer in list(self.tags):
            self.untag(peer)
