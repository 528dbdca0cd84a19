"""The seam for `--verify`: running the code's leak tests before and after a fix is the generator's work."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from auditor.fixes.write import Change

Verifier = Callable[[Sequence[Change], Path | None], Mapping[str, str]]
"""Runs the tests on copies with and without the changes; says why for each path that must stay as it is. The
file holds recipes for what cannot be guessed."""


class CannotVerify(Exception):
    """The tests cannot be run at all; the message says what is missing."""


MODULE = "auditor.leaktests.verify"


def verifier() -> Verifier | None:
    """The generator's `verify`, if it is installed."""
    try:
        found = importlib.util.find_spec(MODULE)
    except ModuleNotFoundError:
        return None
    if found is None:
        return None
    verify: Verifier = importlib.import_module(MODULE).verify
    return verify
