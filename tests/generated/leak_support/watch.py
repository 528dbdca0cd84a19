# poolaudit leaktests, sha256 e160b5fa90764793: written again as long as that is the digest of the rest
"""Sees every operation: those of this thread and of the threads started below it, those of the backward pass
included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from .births import UNSEEN, Births

_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # its argument is what `torch.tensor` has just made


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the results of every operation while it is entered."""

    def __init__(self, births: Births) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._births = births
        self.before: Callable[[Any], None] | None = None
        """Called with each operation before it runs: where a fault pass fails."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, for seconds, to keep it out of the method below

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.before is not None:
            self.before(func)
        call = func._op if type(func) is OpOverload else func  # what its `__call__` passes everything on to
        births = self._births
        if not births.open:  # in a thread that outlived the pass, or before anything is followed
            return call(*args, **(kwargs or {}))
        births.note_all(args, _unseen_before, func)
        if kwargs:
            births.note_all(kwargs.values(), _unseen_before, func)
            result = call(*args, **kwargs)
        else:
            result = call(*args)
        births.note_all((result,), _name, func)
        return result


class watching_threads:
    """While entered, threads that are started are watched as this one is."""

    def __init__(self, make: Callable[[], TorchDispatchMode]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._run = run = threading.Thread.run
        make = self._make

        def watched(thread: threading.Thread) -> None:
            with make():
                run(thread)

        threading.Thread.run = watched  # type: ignore[method-assign, assignment]

    def __exit__(self, *exception: object) -> None:
        threading.Thread.run = self._run  # type: ignore[method-assign]


def _name(func: Any) -> str:
    """`aten.mul.Tensor`, and in the backward pass also the node that asked for it."""
    node = torch._C._current_autograd_node()
    return f"{func} in {node.name()}" if node is not None else str(func)


def _unseen_before(func: Any) -> str:
    """How an argument came to be that no operation made."""
    return "torch.tensor" if func is _LIFT_FRESH else UNSEEN
