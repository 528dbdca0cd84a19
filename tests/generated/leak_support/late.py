# poolaudit leaktests, sha256 fc0fb1904c41d3c6: written again as long as that is the digest of the rest
"""Watching a step only from where its fault can be.

The dispatcher's mode costs more than the operations themselves. So what comes before the call of torch's
functions in which an operation is to fail runs unwatched, and the whole step where an acquire is to fail.
Memory that is made there is found through Python's objects when stock is taken; what a graph alone could
hide is told by the graph's own nodes (`living_nodes`), and then all is done again, watched from the first
operation on.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from .calls import Calls, along
from .nodes import nodes_behind
from .watch import Watch


class Passed(Protocol):
    """Counts the operations of a step."""

    passed: int


class LateWatch:
    """Knows how many operations come before each call of a step."""

    def __init__(self, watch: Watch, count: Passed) -> None:
        self._watch, self._count = watch, count
        self._calls: list[Any] = []
        self._starts: list[int] = []

    def learn(self, step: Callable[[], object]) -> None:
        """A good step, watched and counted all along."""

        def begins(number: int, func: Any) -> None:
            self._calls.append(func)
            self._starts.append(self._count.passed)

        with Calls(begins):
            step()

    @contextmanager
    def before(self, place: int) -> Iterator[None]:
        """Inside, the operation with this number is watched, and few of those before it; nothing is, if the
        step makes other calls than the good one.
        """
        calls = bisect_left(self._starts, place)

        def arrived() -> None:
            self._count.passed = self._starts[calls - 1]
            exits.enter_context(self._watch)

        with ExitStack() as exits:
            exits.enter_context(Calls(along(self._calls[:calls], arrived)) if calls else self._watch)
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
    return len(nodes_behind(left))
