"""Where memory was made that no operation showed: one more step, looked at line by line."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from .births import Births, Frames, readable, stack_of
from .storages import of_python_objects


class _LineByLine:
    """A trace function: whatever is new at a line was made by the line that ran before it."""

    def __init__(self, births: Births) -> None:
        self._births = births
        self._before: Frames = ()
        self.found: Frames = ()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self.found and any(
            not self._births.knows(storage) for _, storage in of_python_objects(youngest=True)
        ):
            self.found = self._before
        self._before = stack_of(frame.f_back if event == "return" else frame)
        return None if self.found else self


def where_unseen(births: Births, step: Callable[[], object]) -> tuple[str, ...]:
    """The stack of the first such storage, innermost line first; empty if this step made none."""
    births.look_around()
    gc.collect()
    trace = _LineByLine(births)
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(previous)
    return tuple(readable(trace.found)) if trace.found else ()
