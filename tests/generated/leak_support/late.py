# poolaudit leaktests, sha256 b9460dee95be7163: written again as long as that is the digest of the rest
"""Watching a step only from where its fault can be.

Most faults are in the backward pass, and the dispatcher's mode costs more than the operations themselves. So
what comes before the backward pass in which an operation is to fail runs unwatched, and the whole step where
an acquire is to fail. Memory that is made there is found through Python's objects when stock is taken; what a
graph alone could hide is told by the graph's own nodes (`living_nodes`), and then all is done again, watched
from the first operation on.
"""

from __future__ import annotations

import gc
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from .watch import Watch

_ENTRIES = ("backward", "grad")
"""The functions of torch.autograd that begin a backward pass."""


class Passed(Protocol):
    """Counts the operations of a step."""

    passed: int


class LateWatch:
    """Knows how many operations come before each backward pass of a step."""

    def __init__(self, watch: Watch, count: Passed) -> None:
        self._watch, self._count = watch, count
        self._starts: list[int] = []
        self._numbers: list[int] = []
        """Which call of autograd each start is."""

    def learn(self, step: Callable[[], object]) -> None:
        """A good step, watched and counted all along."""
        modes, calls = torch._C._len_torch_dispatch_stack(), 0

        def begins() -> None:
            nonlocal calls
            calls += 1
            if (
                torch._C._len_torch_dispatch_stack() == modes
            ):  # else the step would leave our mode for its own
                self._starts.append(self._count.passed)
                self._numbers.append(calls)

        with _told_of_backward(begins):
            step()

    @contextmanager
    def before(self, place: int) -> Iterator[None]:
        """Inside, the operation with this number is watched, and few of those before it."""
        last = bisect_left(self._starts, place) - 1
        calls = 0

        def begins() -> None:
            nonlocal calls
            calls += 1
            if calls == self._numbers[last]:
                self._count.passed = self._starts[last]
                exits.enter_context(self._watch)

        with ExitStack() as exits:
            if last < 0:
                exits.enter_context(self._watch)
                yield
            else:
                with _told_of_backward(begins):
                    yield


@contextmanager
def _told_of_backward(begins: Callable[[], None]) -> Iterator[None]:
    """Calls `begins` before each backward pass of this thread that is not part of another one."""
    thread, running = threading.get_ident(), False

    def told(original: Callable[..., Any]) -> Callable[..., Any]:
        def entry(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            if running or threading.get_ident() != thread:
                return original(*args, **kwargs)
            running = True
            try:
                begins()
                return original(*args, **kwargs)
            finally:
                running = False

        return entry

    with ExitStack() as exits:
        for name in _ENTRIES:
            original = getattr(torch.autograd, name)
            exits.callback(setattr, torch.autograd, name, original)
            setattr(torch.autograd, name, told(original))
        yield


class Unwatched:
    """The same for acquires, which are counted without seeing any operation."""

    def learn(self, step: Callable[[], object]) -> None:
        """A good step."""
        step()

    def before(self, place: int) -> AbstractContextManager[object]:
        """Nothing is watched."""
        return nullcontext()


def living_nodes() -> int:
    """How many nodes autograd's graphs have: those that are Python's objects, contexts of custom functions
    among them, those behind tensors that Python knows, and all that those refer to.
    """
    left: list[Any] = []
    for found in gc.get_objects():
        if hasattr(type(found), "next_functions"):
            left.append(found)
        elif issubclass(type(found), torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():  # as in storages.storage_of
                left.append(found.grad_fn)
    seen: dict[int, Any] = {}
    while left:
        node = left.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node  # kept, or the next one could have its place
            left += [following for following, _ in node.next_functions]
    return len(seen)
