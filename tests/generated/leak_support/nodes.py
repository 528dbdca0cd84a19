# poolaudit leaktests, sha256 2bbab2e053e2d443: written again as long as that is the digest of the rest
"""Watching a backward pass from the node on in which its fault can be; a node that is code of its own (a
custom function's backward), from the call on.

Autograd runs every node, and what it does with the node's results until the next one, in a state of its own
that is put back afterwards. A mode that is entered in a node's hook is thus left after that node, whatever
happens there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .calls import Calls, along
from .countdown import Countdown


class Nodes:
    """Knows how many operations come before each node of one graph, and before each call that a node's own
    code makes.
    """

    def __init__(self, loss: torch.Tensor, watch: TorchDispatchMode, count: Countdown) -> None:
        self._loss, self._watch, self._count = loss, watch, count
        self._starts: list[int] = []
        self._places: list[tuple[Any, int]] = []
        """Each start's node, and how many calls the node's own code has begun by then."""
        self._calls: list[Any] = []
        """What is called at each start; nothing at a node's own."""

    def learn(self, run: Callable[[torch.Tensor], object]) -> None:
        """A good pass, watched and counted all along."""
        with ExitStack() as exits:
            for node in nodes_behind([self._loss.grad_fn]):
                exits.callback(node.register_prehook(partial(self._node_begins, node)).remove)
            exits.enter_context(self._watch)
            run(self._loss)

    def _node_begins(self, node: Any, slopes: object) -> None:
        def begins(number: int, func: Any) -> None:
            self._starts.append(self._count.passed)
            self._places.append((node, number))
            self._calls.append(func)

        begins(0, None)
        torch._C._push_on_torch_function_stack(Calls(begins))

    @contextmanager
    def before(self, place: int) -> Iterator[None]:
        """Inside, the operation with this number is watched, and few of those before it; nothing is, if a
        node's code makes other calls than in the good pass.
        """
        last = bisect_left(self._starts, place) - 1
        if last < 0:
            with self._watch:
                yield
            return
        node, number = self._places[last]
        calls = self._calls[last - number + 1 : last + 1]

        def arrived() -> None:
            self._count.passed = self._starts[last]
            torch._C._push_on_torch_dispatch_stack(self._watch)

        def node_begins(slopes: object) -> None:
            if calls:
                torch._C._push_on_torch_function_stack(Calls(along(calls, arrived)))
            else:
                arrived()

        handle = node.register_prehook(node_begins)
        try:
            yield
        finally:
            handle.remove()


def nodes_behind(left: list[Any]) -> list[Any]:
    """These nodes of graphs and all that they refer to, each once; None stands for no node."""
    seen: dict[int, Any] = {}
    while left:
        node = left.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node  # kept, or the next one could have its place
            left += [following for following, _ in node.next_functions]
    return list(seen.values())
