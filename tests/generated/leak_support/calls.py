# poolaudit leaktests, sha256 7455fb6c7e64e9a0: written again as long as that is the digest of the rest
"""Tells of each call of torch's functions before it runs, for a quarter of what it costs to see the
operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class Calls(TorchFunctionMode):
    """Tells `begins` the number of each outermost call that this thread makes while it is entered, and what
    is called.

    Not counted are those that are made while a mode of the dispatcher handles an operation (it is set aside
    for that time) or while the code under test has entered one: it would leave ours for its own.
    """

    def __init__(self, begins: Callable[[int, Any], None]) -> None:
        super().__init__()
        self._begins = begins
        self._modes = _modes()
        self._number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _modes() == self._modes:
            self._number += 1
            self._begins(self._number, func)
        return func(*args, **kwargs) if kwargs else func(*args)


def along(known: list[Any], arrived: Callable[[], None]) -> Callable[[int, Any], None]:
    """For `Calls`: `arrived` is called before the last of the calls that are known, if all came as they did
    before.
    """
    heard: list[Any] = []

    def begins(number: int, func: Any) -> None:
        heard.append(func)
        if number == len(known) and heard == known:
            arrived()

    return begins
