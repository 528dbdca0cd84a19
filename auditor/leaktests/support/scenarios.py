"""The ways a module is used: each scenario makes one step, a call without arguments that may run again and
again.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .errors import InjectedFault

Target = Callable[..., Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Feed = Callable[[int], Inputs]
Backward = Callable[[torch.Tensor, Callable[[], None]], None]
"""Given the loss, and a function that forgets the gradients of a pass before."""

SHAPES = 4
"""How many shapes `changing_shapes` goes through in each of its steps."""
SCENARIOS = (
    "train",
    "eval",
    "no_grad",
    "checkpointed",
    "autocast",
    "changing_shapes",
    "two_threads",
    "deepcopied",
    "pickled",
)
SINGLE = ("called", "rebuilt", "interrupted")
"""For one path through any code: a plain call, without gradients; the object built anew, called and closed; a
context manager or generator that is left by a failure.
"""
MOST_ITEMS = 100


class Step:
    """One use of a target. `target` is a module or a function; `close()` ends its life."""

    def __init__(self, build: Callable[[], Target], feed: Feed, scenario: str) -> None:
        if scenario not in (*SCENARIOS, *SINGLE):
            raise ValueError(f"no scenario {scenario!r}; there are {', '.join((*SCENARIOS, *SINGLE))}")
        self._build = build
        self.target: Target | None = build()
        self.scenario = scenario
        self._feed = feed
        self._run = getattr(self, f"_{scenario}", self._train)
        self.backward: Backward = _backward
        """How gradients are taken: the fault pass puts its own in the place, which goes through one graph
        many times.
        """
        if isinstance(self.target, torch.nn.Module):
            self.target.train(scenario not in ("eval", "no_grad"))

    def __call__(self) -> None:
        """Use the target once."""
        self._run()

    def close(self) -> None:
        """Let the target give back what it keeps between steps, and drop it."""
        target, self.target = self.target, None
        target = getattr(target, "__self__", target)  # the object whose method is called
        for name in ("cleanup_memory_pool", "cleanup", "close", "shutdown"):
            method = getattr(target, name, None)
            if callable(method):
                method()
                break

    def _train(self, turn: int = 0) -> None:
        self._forward_and_backward(self._target, turn)

    def _eval(self) -> None:
        args, kwargs = self._feed(0)
        self._target(*args, **kwargs)

    def _no_grad(self) -> None:
        with torch.no_grad():
            self._eval()

    def _checkpointed(self) -> None:
        target = self._target
        self._forward_and_backward(
            lambda *args, **kwargs: checkpoint(target, *args, use_reentrant=False, **kwargs), 0
        )

    def _autocast(self) -> None:
        device = next((t.device.type for t in tensors_in(self._feed(0))), "cpu")
        with torch.autocast(device, torch.bfloat16):
            self._train()

    def _changing_shapes(self) -> None:
        for turn in range(SHAPES):
            self._train(turn)

    def _two_threads(self) -> None:
        failures: list[BaseException] = []
        threads = [threading.Thread(target=self._guarded, args=(failures,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures.pop()

    def _guarded(self, failures: list[BaseException]) -> None:
        try:
            self._no_grad()
        except BaseException as failure:
            failures.append(failure)

    def _deepcopied(self) -> None:
        self._forward_and_backward(copy.deepcopy(self._target), 0)

    def _pickled(self) -> None:
        with io.BytesIO() as file:
            torch.save(self._target, file)
            file.seek(0)
            copied = torch.load(file, weights_only=False)
        self._forward_and_backward(copied, 0)

    def _called(self) -> None:
        args, kwargs = self._feed(0)
        use(self._target(*args, **kwargs))

    def _rebuilt(self) -> None:
        self.close()
        self.target = self._build()
        self._called()
        self.close()

    def _interrupted(self) -> None:
        args, kwargs = self._feed(0)
        interrupt(self._target(*args, **kwargs))

    @property
    def _target(self) -> Target:
        if self.target is None:
            raise RuntimeError("this step was closed")
        return self.target

    def _forward_and_backward(self, target: Target, turn: int) -> None:
        args, kwargs = with_gradients(self._feed(turn))
        if isinstance(self.target, torch.nn.Module):
            self.target.zero_grad(set_to_none=True)
        loss = loss_of(target(*args, **kwargs))
        if loss is not None:
            with (
                torch.autocast(loss.device.type, enabled=False)
                if self.scenario == "autocast"
                else nullcontext()
            ):
                self.backward(loss, lambda: self.forget_gradients(args, kwargs))

    def forget_gradients(self, *inputs: Any) -> None:
        """As it was before a backward pass."""
        for leaf in tensors_in(inputs):
            leaf.grad = None
        if isinstance(self.target, torch.nn.Module):
            self.target.zero_grad(set_to_none=True)


def _backward(loss: torch.Tensor, forget: Callable[[], None]) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def use(outcome: Any) -> None:
    """What a caller does with what is entered or iterated: all of it, to its end."""
    if hasattr(outcome, "__enter__") and hasattr(outcome, "__exit__"):
        with outcome:
            pass
    elif isinstance(outcome, Iterator):
        for _ in islice(outcome, MOST_ITEMS):
            pass


def interrupt(outcome: Any) -> None:
    """The same, left by a failure inside the block, or closed after the first item."""
    if hasattr(outcome, "__enter__") and hasattr(outcome, "__exit__"):
        with suppress(InjectedFault), outcome:
            raise InjectedFault("injected inside the block")
    elif isinstance(outcome, Generator):
        next(outcome, None)
        outcome.close()


def make_step(build: Callable[[], Target], feed: Feed, scenario: str = "train") -> Step:
    """A step of this scenario. `build()` makes the module or function, `feed(turn)` its arguments as
    `(args, kwargs)`; turns 0 to 3 may differ in shape.
    """
    return Step(build, feed, scenario)


def followed_by(target: Target, *names: str) -> Target:
    """The target's call, and after it those methods of the target, or of the object whose method it is."""
    owner = getattr(target, "__self__", target)

    def call(*args: Any, **kwargs: Any) -> Any:
        outcome = target(*args, **kwargs)
        for name in names:
            getattr(owner, name)()
        return outcome

    call.__self__ = owner  # type: ignore[attr-defined]
    return call


def tensors_in(nested: Any) -> Iterator[torch.Tensor]:
    """Every tensor in tuples, lists, dicts and dataclasses, in order."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, dict):
        yield from tensors_in(list(nested.values()))
    elif isinstance(nested, (tuple, list)):
        for item in nested:
            yield from tensors_in(item)
    elif is_dataclass(nested) and not isinstance(nested, type):
        yield from tensors_in([getattr(nested, entry.name) for entry in fields(nested)])


def with_gradients(inputs: Inputs) -> Inputs:
    """The same arguments, where floating-point tensors of their own ask for gradients."""

    def wanted(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.is_leaf:
            return value.detach().requires_grad_()
        return value

    args, kwargs = inputs
    return tuple(map(wanted, args)), {name: wanted(value) for name, value in kwargs.items()}


def loss_of(outputs: Any) -> torch.Tensor | None:
    """The sum of everything that a gradient can start from; None if nothing can."""
    parts = [tensor.float().sum() for tensor in tensors_in(outputs) if tensor.requires_grad]
    return torch.stack(parts).sum() if parts else None
