# poolaudit leaktests, sha256 3b224482cc02689d: written again as long as that is the digest of the rest
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
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .countdown import Countdown
from .errors import InjectedFault
from .nodes import Nodes
from .scenarios import Backward, Step


class OneGraph:
    """Knows the operations of a step, and which of them are its backward pass."""

    def __init__(self, step: Callable[[], object], count: Countdown) -> None:
        self._step, self._count = step, count
        self._operations: list[Any] = []
        self._passes: list[range] = []

    def learn(self, run: Callable[[], object]) -> None:
        """A good step, counted, which begins as steps begin whose forward pass fails: without gradients."""
        if isinstance(self._step, Step):
            self._step.forget_gradients()

        def backward(loss: torch.Tensor, forget: Callable[[], None]) -> None:
            before = self._count.passed
            loss.backward()  # type: ignore[no-untyped-call]
            self._passes.append(range(before + 1, self._count.passed + 1))

        self._count.heard = self._operations
        with self._taking(backward):
            run()
        self._count.heard = None

    def stands_at(self, place: int, operation: str) -> bool:
        """Whether a good step has this operation in that place."""
        return str(self._operations[place - 1]) == operation

    def goes_as_learned(self) -> bool:
        """Whether a good step, watched and counted all along, has these operations; calls are told of no
        longer.
        """
        heard: list[object] = []
        self._count.heard = heard
        self._step()
        self._count.heard = None
        return heard == self._operations

    def fail(self, as_before: Callable[[], bool], watch: TorchDispatchMode | None) -> dict[int, str]:
        """One step, with a fault at every place of its backward pass: in which operation's place each was.
        `as_before` says whether no lease is out that was not before. Where operations are counted, they are
        counted by `watch`, which is entered where it is needed.
        """
        names: dict[int, str] = {}

        def backward(loss: torch.Tensor, forget: Callable[[], None]) -> None:
            nodes = Nodes(loss, watch, self._count) if watch is not None else None
            goes_as_usual = self._learned(nodes, forget) if nodes else self._count.passed == before
            if goes_as_usual and as_before():
                for place in self._passes[0]:
                    self._count.arm(place, before)
                    with nodes.before(place) if nodes else nullcontext():
                        self._once(loss)
                    forget()
                    if self._count.failed_in != str(self._operations[place - 1]) or not as_before():
                        break
                    names[place] = self._count.failed_in
            raise InjectedFault("the graph has served")

        if len(self._passes) == 1:
            before = self._passes[0].start - 1
            self._count.arm(None)
            with self._taking(backward), suppress(InjectedFault):
                self._step()
        return names

    def _learned(self, nodes: Nodes, forget: Callable[[], None]) -> bool:
        """Whether a good pass through this graph has the operations of the step's own pass."""
        own = slice(self._passes[0].start - 1, self._passes[0].stop - 1)
        heard: list[object] = []
        self._count.arm(None, own.start)
        self._count.heard = heard
        nodes.learn(self._once)
        self._count.heard = None
        forget()
        return heard == self._operations[own]

    @staticmethod
    def _once(loss: torch.Tensor) -> None:
        """One pass; which operations it came to is known without its failure."""
        with suppress(Exception):  # the fault, or what the code made of it
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
