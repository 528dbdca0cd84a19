# poolaudit leaktests, sha256 97385790335353d1: written again as long as that is the digest of the rest
"""Watches every storage come into being: which operation made it, and from which lines.

The dispatcher shows each operation of this thread and of the threads started below it, those of the backward
pass included. What is made past it (numpy's memory, raw storages) is found by `Births.look_around`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .storages import Handle, of_python_objects, storage_of

DEEPEST_STACK = 60
UNSEEN = "memory made outside torch's dispatcher"
_HERE = str(Path(__file__).parent)
_STARTED_IN = Path.cwd()  # generated tests go elsewhere, so that what they write is thrown away
_DRIVERS = {
    str(Path(_HERE, name))
    for name in ("ledger.py", "culprits.py", "faults.py", "leases.py", "quiet.py", "blame.py", "unseen.py")
}
_WATCHERS = {*_DRIVERS, __file__, str(Path(_HERE, "pools.py")), torch._ops.__file__}
_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # its argument is what `torch.tensor` has just made
_TORCH = str(Path(torch.__file__).parent)
_STANDARD_LIBRARY = str(Path(threading.__file__).parent)

Frames = tuple[tuple[CodeType, int], ...]
Place = tuple[str, Frames]


@dataclass(eq=False, slots=True)
class Birth:
    """One storage: by what and where it was made, in which turn, and whether it still lives."""

    handle: Handle
    operation: str
    frames: Frames
    turn: int
    known_before: bool = False

    @property
    def place(self) -> Place:
        """What births of one kind have in common."""
        return self.operation, self.frames


@dataclass(eq=False)
class Births:
    """Every storage seen since it was made, by the address of its C++ object."""

    turn: int = 0
    """Which window or fault is running: kept with each birth."""
    open: bool = True
    _seen: dict[int, Birth] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether this very storage was taken down."""
        return storage._cdata in self._seen

    def note(self, storage: torch.UntypedStorage, operation: str, *, known_before: bool = False) -> None:
        """Take down a storage that is not known."""
        frames = () if known_before or operation is UNSEEN else stack_here()
        with self._lock:
            self._seen[storage._cdata] = Birth(Handle(storage), operation, frames, self.turn, known_before)

    def look_around(self, *, known_before: bool = False) -> None:
        """Take down what Python objects hold and no operation showed."""
        for _, storage in of_python_objects():
            if not self.knows(storage):
                self.note(storage, UNSEEN, known_before=known_before)

    def living(self) -> list[tuple[Birth, torch.UntypedStorage]]:
        """What is alive of all that was seen; the rest is forgotten. The caller holds what it is given."""
        with self._lock:
            found = [(birth, birth.handle.storage()) for birth in self._seen.values()]
            alive = [(birth, storage) for birth, storage in found if storage is not None]
            self._seen = {storage._cdata: birth for birth, storage in alive}
        return alive


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the results of every operation while it is entered."""

    def __init__(self, births: Births) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._births = births

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, for seconds, to keep it out of the method below

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        births = self._births
        if not births.open:  # a thread that outlived the pass
            return func(*args, **(kwargs or {}))
        for storage in _storages((args, kwargs)):
            if not births.knows(storage):
                births.note(storage, "torch.tensor" if func is _LIFT_FRESH else UNSEEN)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if not births.knows(storage):
                births.note(storage, _name(func))
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
    try:
        return str(path.relative_to(_STARTED_IN))
    except ValueError:
        return filename


def stack_here() -> Frames:
    """From the operation out to the step: what watches and what drives it is left out, so that two births at
    one place have equal stacks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _WATCHERS:
        frame = frame.f_back
    return stack_of(frame)


def stack_of(frame: FrameType | None) -> Frames:
    """From this frame out to what drives the step."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < DEEPEST_STACK and frame.f_code.co_filename not in _DRIVERS:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _name(func: Any) -> str:
    """`aten.mul.Tensor`, and in the backward pass also the node that asked for it."""
    node = torch._C._current_autograd_node()
    return f"{func} in {node.name()}" if node is not None else str(func)


def _storages(nested: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(nested, torch.Tensor):
        storage = storage_of(nested)
        if storage is not None:
            yield storage
    elif isinstance(nested, (tuple, list)):
        for item in nested:
            yield from _storages(item)
    elif isinstance(nested, dict):
        yield from _storages(list(nested.values()))
