# poolaudit leaktests, sha256 4fbdeb53f6bbcc62: written again as long as that is the digest of the rest
"""The faults of a backward pass, one after the other on the same graph.

A fault in the backward pass needs the forward pass for nothing but its graph, and autograd goes through a
graph as often as it is asked to: one step serves for all of them. Between the scenario and autograd there is
no code but this support's, so that nothing else could see that a pass failed.

What is held where the graph has been is judged when the graph is gone. Wherever anything goes otherwise than
in a good step (another operation in a place, a lease that stands, an error of the code's own because it
cannot be run twice) the faults from there on are left to steps of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .countdown import Countdown
from .errors import InjectedFault
from .scenarios import Backward, Step


class OneGraph:
    """Knows the operations of a step, and which of them are its backward pass."""

    def __init__(self, step: Callable[[], object], count: Countdown) -> None:
        self._step, self._count = step, count
        self._operations: list[Any] = []
        self._passes: list[range] = []

    def learn(self, run: Callable[[], object]) -> None:
        """A good step, counted."""

        def backward(loss: torch.Tensor, forget: Callable[[], None]) -> None:
            before = self._count.passed
            loss.backward()  # type: ignore[no-untyped-call]
            self._passes.append(range(before + 1, self._count.passed + 1))

        self._count.heard = self._operations
        with self._taking(backward):
            run()
        self._count.heard = None

    def fail(self, as_before: Callable[[], bool]) -> dict[int, str]:
        """One step, with a fault at every place of its backward pass: in which operation's place each was.
        `as_before` says whether no lease is out that was not before.
        """
        names: dict[int, str] = {}

        def backward(loss: torch.Tensor, forget: Callable[[], None]) -> None:
            if self._count.passed + 1 == self._passes[0].start and as_before():
                for place in self._passes[0]:
                    self._once(place, loss)
                    forget()
                    if self._count.failed_in != str(self._operations[place - 1]) or not as_before():
                        break
                    names[place] = self._count.failed_in
            raise InjectedFault("the graph has served")

        if len(self._passes) == 1:
            self._count.arm(None)
            with self._taking(backward), suppress(InjectedFault):
                self._step()
        return names

    def _once(self, place: int, loss: torch.Tensor) -> None:
        self._count.arm(place, self._passes[0].start - 1)
        with suppress(
            Exception
        ):  # the fault, or what the code made of it: `failed_in` says which place it was
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def _taking(self, backward: Backward) -> Iterator[None]:
        """While entered, the step takes gradients so; steps that are not a scenario go their own way."""
        if not isinstance(self._step, Step):
            yield
            return
        usual, self._step.backward = self._step.backward, backward
        try:
            yield
        finally:
            self._step.backward = usual
