"""Every storage that came into being, by which operation it was made, and from which lines.

Operations are shown by `watch.Watch`; what is made past the dispatcher (numpy's memory, raw storages) is
found by `Births.look_around`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, NoneType
from typing import Any

import torch

from .storages import PLAIN_TENSORS, expired, forget, of_python_objects, storage_at, storage_of, weak_pointer

DEEPEST_STACK = 60
UNSEEN = "memory made outside torch's dispatcher"
_HERE = str(Path(__file__).parent)
_STARTED_IN = Path.cwd()  # generated tests go elsewhere, so that what they write is thrown away
_DRIVERS = {
    str(Path(_HERE, f"{name}.py"))
    for name in (
        "ledger",
        "culprits",
        "faults",
        "one_graph",
        "countdown",
        "leases",
        "quiet",
        "blame",
        "unseen",
        "late",
    )
}
_WATCHERS = {
    *_DRIVERS,
    *(str(Path(_HERE, f"{name}.py")) for name in ("births", "watch", "pools")),
    torch._ops.__file__,
}
_TORCH = str(Path(torch.__file__).parent)
_STANDARD_LIBRARY = str(Path(threading.__file__).parent)
_NUMBERS = {int, float, bool}
_NO_TENSORS = {*_NUMBERS, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}
"""What most arguments of operations are, beside tensors: not worth a second look."""

Frames = tuple[tuple[CodeType, int], ...]
"""Innermost first, each with its line."""
Marks = tuple[tuple[CodeType, int], ...]
"""The same with the instruction in the place of the line, which takes many times longer to find out."""
Place = tuple[str, Frames]


class Birth:
    """One storage that lives: by what and where it was made, and in which turn."""

    __slots__ = ("_weak", "marks", "operation", "turn")

    def __init__(self, weak: int, operation: str = UNSEEN, marks: Marks = (), turn: int = 0) -> None:
        self._weak = weak
        self.operation, self.marks, self.turn = operation, marks, turn

    @property
    def place(self) -> Place:
        """What births of one kind have in common."""
        return self.operation, frames_of(self.marks)

    def __del__(self) -> None:
        forget(self._weak)


@dataclass(eq=False)
class Births:
    """Every storage seen since it was made, by the address of its C++ object."""

    turn: int = 0
    """Which window or fault is running: kept with each birth."""
    open: bool = True
    """Whether what is shown is taken down."""
    placed: bool = False
    """Whether operation and stack are kept too. That costs as much as everything else together, so passes ask
    for it once something grows.
    """
    _seen: dict[int, int | Birth] = field(default_factory=dict)
    """Bare weak pointers where nothing else is kept: nearly all storages are dead before anyone asks."""

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether this very storage was taken down."""
        return storage._cdata in self._seen

    def note(self, storage: torch.UntypedStorage, operation: str) -> None:
        """Take down a storage that is not known, with its place."""
        marks = marks_here() if operation is not UNSEEN else ()
        birth = Birth(weak_pointer(storage), operation, marks, self.turn)
        self._seen.setdefault(storage._cdata, birth)

    def note_all(self, values: Iterable[Any], name: Callable[[Any], str], operation: Any) -> None:
        """Take down the storages of all tensors in `values` that are not known: this runs for every argument
        of every operation, and nearly all of them are known.
        """
        seen = self._seen
        for value in values:
            kind = type(value)
            if kind in PLAIN_TENSORS:
                try:
                    storage = value.untyped_storage()  # to ask first whether there is one costs more
                except NotImplementedError:
                    continue
            elif kind in _NO_TENSORS:
                continue
            elif kind is list:  # asked first: to ask whether it is a tensor takes longer
                if value and type(value[0]) not in _NUMBERS:  # a list of sizes holds nothing else
                    self.note_all(value, name, operation)
                continue
            elif isinstance(value, torch.Tensor):
                found = storage_of(value)
                if found is None:
                    continue
                storage = found
            else:
                self._note_inside(value, name, operation)
                continue
            address = storage._cdata
            if address not in seen:
                if self.placed:
                    self.note(storage, name(operation))
                else:
                    weak = weak_pointer(storage)
                    if seen.setdefault(address, weak) is not weak:
                        forget(weak)  # another thread was quicker

    def _note_inside(self, value: Any, name: Callable[[Any], str], operation: Any) -> None:
        if isinstance(value, (tuple, list)):
            self.note_all(value, name, operation)
        elif isinstance(value, dict):
            self.note_all(value.values(), name, operation)

    def look_around(self) -> None:
        """Take down what Python objects hold and no operation showed."""
        for _, storage in of_python_objects():
            if not self.knows(storage):
                self.note(storage, UNSEEN)

    def count_living(self) -> int:
        """How many of all that were seen are alive."""
        return sum(not expired(_pointer(entry)) for entry in list(self._seen.values()))

    def living(self) -> list[tuple[Birth, torch.UntypedStorage]]:
        """What is alive of all that was seen; the rest is forgotten. The caller holds what it is given."""
        alive = []
        for address, entry in list(self._seen.items()):
            storage = storage_at(_pointer(entry))
            if storage is None:
                self._seen.pop(address)
                if isinstance(entry, int):
                    forget(entry)
                continue
            if isinstance(entry, int):
                self._seen[address] = entry = Birth(entry)
            alive.append((entry, storage))
        return alive

    def __del__(self) -> None:
        for entry in self._seen.values():
            if isinstance(entry, int):
                forget(entry)


def _pointer(entry: int | Birth) -> int:
    return entry if isinstance(entry, int) else entry._weak


def readable(frames: Frames) -> list[str]:
    """A stack as lines, innermost first, without the frames of torch, of the standard library and of this
    support.
    """
    theirs = [frame for frame in frames if not _is_machinery(frame[0].co_filename)]
    return [f"{_short(code.co_filename)}:{line} in {code.co_qualname}" for code, line in theirs or frames[:3]]


def readable_lines(lines: list[tuple[str, int]]) -> list[str]:
    """The same for a stack of which only files and lines are known."""
    return [f"{_short(filename)}:{line}" for filename, line in lines if not _is_machinery(filename)]


def _is_machinery(filename: str) -> bool:
    if filename.startswith(("<", _HERE, _TORCH)):
        return Path(filename).name != "planted.py"
    return filename.startswith(_STANDARD_LIBRARY) and "-packages" not in filename


def _short(filename: str) -> str:
    path = Path(filename)
    for folder in (_STARTED_IN, Path(_HERE).parent):  # the tests' own folder may be a temporary one
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return filename


def stack_of(frame: FrameType | None) -> Frames:
    """From this frame out to what drives the step."""
    return frames_of(_marks_of(frame))


def frames_of(marks: Marks) -> Frames:
    """With the lines, which are asked for once something is told."""
    return tuple((code, _line(code, mark)) for code, mark in marks)


def marks_here() -> Marks:
    """From the operation out to the step: what watches and what drives it is left out, so that two births at
    one place have equal stacks.
    """
    return _marks_of(_innermost_watched())


def _innermost_watched() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _WATCHERS:
        frame = frame.f_back
    return frame


def _marks_of(frame: FrameType | None) -> Marks:
    found: list[tuple[CodeType, int]] = []
    for _ in range(
        DEEPEST_STACK
    ):  # for every lease of every step: what is asked here costs as much as the pool
        if frame is None or (code := frame.f_code).co_filename in _DRIVERS:
            break
        found.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


@lru_cache(maxsize=4096)
def _line(code: CodeType, mark: int) -> int:
    """The line of an instruction."""
    for start, end, line in code.co_lines():
        if start <= mark < end and line is not None:
            return line
    return code.co_firstlineno
