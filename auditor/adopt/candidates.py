"""Which classes a run is about: those that were named, or every module that ought to use a pool."""

import difflib
import re
from collections.abc import Sequence

from auditor.adopt.project import Project, has_mixin
from auditor.source.entries import ClassIndex

_TEST_FILE = re.compile(r"(?:^|/)tests?/|(?:^|/)(?:test_[^/]*|conftest|[^/]*_test)\.py$")


class UnknownClass(Exception):
    """A name that no class of the project has; the message suggests one."""


def named(project: Project, names: Sequence[str]) -> list[ClassIndex]:
    """The classes of these names or qualified names. Raises UnknownClass."""
    found: list[ClassIndex] = []
    for name in dict.fromkeys(names):
        fitting = [each for each in project.table.classes() if name in (each.name, each.qualname)]
        if not fitting:
            raise UnknownClass(_unknown(project, name))
        found += fitting
    return found


def _unknown(project: Project, name: str) -> str:
    known = sorted({each.name for each in project.table.classes()})
    modules = sorted({each.name for each in project.table.classes() if project.is_module(each)})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"no class is called {name}; did you mean {near[0]}?"
    if not modules:
        return f"no class is called {name}, and there is no nn.Module under the given paths"
    shown = ", ".join(modules[:6]) + (f" and {len(modules) - 6} more" if len(modules) > 6 else "")
    return f"no class is called {name}; the modules here are {shown}"


def wanting(project: Project) -> list[ClassIndex]:
    """Modules that make large temporaries on their forward path, and those that have the mixin already."""
    return [each for each in project.table.classes() if _ought(project, each)]


def _ought(project: Project, entry: ClassIndex) -> bool:
    if _TEST_FILE.search(entry.span.path) or not project.is_module(entry):
        return False
    if has_mixin(entry):
        return True
    uses = entry.mentions_pool or entry.acquires or entry.releases or entry.defines_pool
    return not (uses or entry.is_abstract) and any(each.temporary for each in entry.allocations)
