"""Planted leaks, one function a kind: `kind(size)` makes a step that leaks `size` floats each time it is
called.

The line that makes what is leaked ends in `# leak`; a test has found the right one if it names that line.
Kinds are found by listing the modules of this folder.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable

Kind = Callable[[int], Callable[[], object]]


def kinds() -> dict[str, Kind]:
    """Every kind by name, sorted."""
    found: dict[str, Kind] = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                found[name] = value
    return dict(sorted(found.items()))


def halves() -> tuple[list[str], list[str]]:
    """The kinds on which rules are chosen, and those on which they are only measured: every second by
    name.
    """
    names = list(kinds())
    return names[::2], names[1::2]
