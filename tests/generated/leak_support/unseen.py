# poolaudit leaktests, sha256 d538a1a08ab6344d: written again as long as that is the digest of the rest
"""Where memory was made or grew that no operation showed: one more step, looked at line by line."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from .births import Births, Frames, readable, stack_of
from .storages import of_python_objects


class _LineByLine:
    """A trace function: what has happened when a line begins was done by the line that ran before it."""

    def __init__(self, happened: Callable[[], bool]) -> None:
        self._happened = happened
        self._before: Frames = ()
        self.found: Frames = ()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self.found and self._happened():
            self.found = self._before
        self._before = stack_of(frame.f_back if event == "return" else frame)
        return None if self.found else self


def where_unseen(births: Births, step: Callable[[], object]) -> tuple[str, ...]:
    """The stack of the first such storage, innermost line first; empty if this step made none."""
    births.look_around()
    gc.collect()

    def new() -> bool:
        return any(not births.knows(storage) for _, storage in of_python_objects(youngest=True))

    return _traced(step, new)


def where_grown(births: Births, step: Callable[[], object]) -> tuple[str, ...]:
    """The stack in which a storage that is older than the pass becomes larger; empty if none does."""
    old = [(storage, storage.nbytes()) for birth, storage in births.living() if not birth.marks]
    return _traced(step, lambda: any(storage.nbytes() > size for storage, size in old))


def _traced(step: Callable[[], object], happened: Callable[[], bool]) -> tuple[str, ...]:
    trace = _LineByLine(happened)
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(previous)
    return tuple(readable(trace.found)) if trace.found else ()
