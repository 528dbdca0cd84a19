"""Steps that leak nothing, by name: what is found here is a false alarm.

`makers()` gives makers, each to be called in a process of its own; a maker returns steps by scenario.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.leaktests.clean import habits, ours, torch_modules

Maker = Callable[[], dict[str, Callable[[], object]]]


def makers() -> dict[str, Maker]:
    """Everything clean, by name."""
    return {**torch_modules.makers(), **ours.makers(), **habits.makers()}
