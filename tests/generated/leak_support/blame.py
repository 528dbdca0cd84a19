# poolaudit leaktests, sha256 70af8146d6c5d5a7: written again as long as that is the digest of the rest
"""Who made what the quiet pass found growing: one more run, this time looked at closely."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from .births import Frames, readable, readable_lines
from .errors import Culprit
from .heap import heap_bytes
from .referrers import holders_of

Step = Callable[[], object]
DEEPEST_TRACE = 25
MOST_NAMED = 3
PROFILED_WINDOWS = 4
"""Freed chunks that malloc keeps ready hide the first of a leak's."""


def blame_blocks(step: Step, steps: int, leak: float) -> tuple[Culprit, ...]:
    """The lines whose objects stayed, of which types they are, and who holds one of them."""
    kinds, held_by = _stayed(step, steps)
    tracemalloc.start(DEEPEST_TRACE)
    try:
        _run(step, steps)
        before = tracemalloc.take_snapshot()
        _run(step, 2 * steps)
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    culprits = []
    for difference in after.compare_to(before, "traceback"):
        stack = readable_lines([(frame.filename, frame.lineno) for frame in reversed(difference.traceback)])
        if difference.count_diff >= steps and stack:
            size = difference.size_diff / (2 * steps)
            blocks = difference.count_diff / (2 * steps)
            number = f"{blocks:.2g} block{'' if round(blocks, 1) == 1 else 's'}"
            operation = f"{number}, {size:.0f} bytes a step, of {kinds}"
            culprits.append(Culprit(operation, 0.0, size, stack[0], tuple(stack), held_by))
    return tuple(culprits[:MOST_NAMED])


def _stayed(step: Step, steps: int) -> tuple[str, tuple[str, ...]]:
    """The types of which every step leaves at least one object, and who holds one such object."""
    _run(step, steps)
    known = {id(found) for found in gc.get_objects()}
    _run(step, steps)
    fresh = [found for found in gc.get_objects() if id(found) not in known]
    kinds = [(kind, n) for kind, n in Counter(map(type, fresh)).most_common(5) if n >= steps]
    example = next((found for kind, _ in kinds for found in fresh if type(found) is kind), None)
    del fresh, known
    words = ", ".join(f"{number / steps:.2g} {kind.__qualname__}" for kind, number in kinds)
    return words or "objects that refer to nothing", holders_of(example) if example is not None else ()


def _run(step: Step, steps: int) -> None:
    for _ in range(steps):
        step()
    gc.collect()


@dataclass
class _Call:
    """One way of calling, and by how much C's heap grew inside."""

    what: str
    frames: Frames
    growth: int = 0
    below: dict[Any, _Call] = field(default_factory=dict)

    @property
    def own(self) -> int:
        """The growth that no call inside this one accounts for."""
        return self.growth - sum(call.growth for call in self.below.values())


class _HeapByCall:
    """A profile function that books the heap's growth on the calls in which it happened."""

    def __init__(self) -> None:
        self.root = _Call("the step", ())
        self.begin()

    def begin(self) -> None:
        """Nothing is open: switching the profile off is a call that never returns to it."""
        self._open: list[tuple[_Call, int]] = [(self.root, 0)]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            caller = frame.f_back if event == "call" else frame
            code: Any = frame.f_code if event == "call" else getattr(argument, "__qualname__", str(argument))
            line = caller.f_lineno if caller is not None else 0
            parent = self._open[-1][0]
            call = parent.below.get((code, line))
            if call is None:
                frames = _stack(frame)
                call = parent.below[code, line] = _Call(str(getattr(code, "co_qualname", code)), frames)
            self._open.append((call, heap_bytes()))
        elif event in ("return", "c_return", "c_exception") and len(self._open) > 1:
            call, before = self._open.pop()
            call.growth += heap_bytes() - before


def blame_heap(step: Step, steps: int, leak: float) -> tuple[Culprit, ...]:
    """The call whose own growth, without that of the calls inside, comes nearest to the leak of a step: what
    is freed again later grows by other amounts.
    """
    profile = _HeapByCall()
    for turn in range(PROFILED_WINDOWS + 1):
        if turn == 1:
            _forget(profile.root)  # in the first window the profile's own memory grew
        profile.begin()
        sys.setprofile(profile)
        try:
            for _ in range(steps):
                step()
        finally:
            sys.setprofile(None)
    runs = PROFILED_WINDOWS * steps
    call = min(_calls(profile.root), key=lambda call: abs(call.own / runs - leak))
    stack = readable(_at_its_line(call, step, steps, leak))
    words = f"{call.own / runs:,.0f} bytes of C's heap a step inside {call.what}"
    return (Culprit(words, 0.0, call.own / runs, stack[0] if stack else "?", tuple(stack), ()),)


def _at_its_line(call: _Call, step: Step, steps: int, leak: float) -> Frames:
    """The stack of a call with the line in the place of the function's first one: an operator is no call, so
    what it takes is booked on the function around it.
    """
    code, first = call.frames[0]
    if first != code.co_firstlineno:
        return call.frames
    lines = _HeapByLine(code)
    previous = sys.gettrace()
    sys.settrace(lines)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.settrace(previous)
    if not lines.growth:
        return call.frames
    line = min(lines.growth, key=lambda line: abs(lines.growth[line] / steps - leak))
    return ((code, line), *call.frames[1:])


class _HeapByLine:
    """A trace function that books the heap's growth on the lines of one function."""

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._open: dict[FrameType, tuple[int, int]] = {}
        self.growth: Counter[int] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not self._code:
            return None
        if frame in self._open:
            line, before = self._open.pop(frame)
            self.growth[line] += heap_bytes() - before
        if event in ("call", "line"):
            self._open[frame] = (frame.f_lineno, heap_bytes())
        return self


def _calls(call: _Call) -> Iterator[_Call]:
    for below in call.below.values():
        yield below
        yield from _calls(below)


def _forget(call: _Call) -> None:
    call.growth = 0
    for below in call.below.values():
        _forget(below)


def _stack(frame: FrameType | None) -> Frames:
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < DEEPEST_TRACE:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
