"""One output format a file: a pure function of a finished run.

A format is a module of this folder with `render`; a leading underscore marks what the formats share.
"""

import importlib
import pkgutil
from typing import Protocol, cast

from auditor.model import Run


class Render(Protocol):
    """Text of `run`; `width` is the terminal's, `color` whether escapes may be used."""

    def __call__(self, run: Run, *, color: bool, width: int) -> str: ...


def formats() -> tuple[str, ...]:
    """Names of all formats, sorted."""
    return tuple(
        sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    )


def renderer(name: str) -> Render:
    """The `render` of one format; imported only now, so that nobody pays for the others."""
    if name not in formats():
        raise ValueError(f"no output format {name!r}; there are {', '.join(formats())}")
    return cast(Render, importlib.import_module(f"reports.{name}").render)
