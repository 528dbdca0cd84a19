"""`--verify`: the generated tests of changed files, run on copies of the code before and after the change.

A file may be changed if every test that its code has afterwards passes, but for those that failed before too;
and if there are such tests at all.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from auditor.leaktests.generate import Order, generate
from auditor.leaktests.render import file_name
from auditor.leaktests.running import TestOrder, run_files
from auditor.leaktests.workshop import Workshop, need_pytest, workshop
from auditor.source.discover import SourceFile

_NOT_COPIED = shutil.ignore_patterns(
    ".*", "__pycache__", "node_modules", "build", "dist", "venv", "*.so.dSYM"
)


class _Text(Protocol):
    @property
    def data(self) -> bytes: ...


class Change(Protocol):
    """A file, and its bytes afterwards; one that is not there yet is made."""

    @property
    def file(self) -> SourceFile: ...
    @property
    def after(self) -> _Text: ...


@dataclass(frozen=True, slots=True)
class Tested:
    """What the tests of one copy said: by path as reports show it, and by test, whether it was good."""

    results: Mapping[str, Mapping[str, str]]
    unplanned: Mapping[str, str]


def verify(changes: Sequence[Change]) -> Mapping[str, str]:
    """Why each of the paths must stay as it is that must. Raises WorkshopError where nothing can be run."""
    need_pytest()
    root = _root(changes)
    with tempfile.TemporaryDirectory(prefix="poolaudit-") as folder, workshop() as shop:
        copies = {name: Path(folder) / name / root.name for name in ("before", "after")}
        for copy in copies.values():
            shutil.copytree(root, copy, ignore=_NOT_COPIED)
        for change in changes:
            target = copies["after"] / _within(change, root)
            target.write_bytes(change.after.data)
        tested = {name: _tested(changes, root, copy, shop) for name, copy in copies.items()}
    return dict(_objections(changes, tested["before"], tested["after"]))


def _objections(changes: Sequence[Change], before: Tested, after: Tested) -> Iterator[tuple[str, str]]:
    for path in (change.file.path for change in changes):
        failed = after.results.get(path, {})
        earlier = before.results.get(path, {})
        new = sorted(name for name, why in failed.items() if why and not earlier.get(name))
        if new:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            reason = failed[new[0]].strip().splitlines()[-1:] or [""]
            yield path, f"failed its tests: {new[0]}{more}: {reason[0]}"
        elif path in after.unplanned and not failed:
            yield path, f"has no test that could be run: {after.unplanned[path]}"


def _tested(changes: Sequence[Change], root: Path, copy: Path, shop: Workshop) -> Tested:
    """The tests of the changed files of one copy, made and run there."""
    shown = {}
    for change in changes:
        location = copy / _within(change, root)
        if location.exists():
            shown[os.fspath(location)] = change.file.path
    files = [SourceFile(location, location) for location in sorted(shown)]
    folder = copy.parent / "tests"
    generated = generate(Order(files, (), folder), shop)
    tests = {folder / file_name(plan): shown[plan.target.path] for plan in generated.planned.plans}
    results: dict[str, dict[str, str]] = {}
    for run in run_files(TestOrder(sorted(tests)), shop):
        bad = {case.name: case.message or case.outcome for case in run.bad}
        of_path = results.setdefault(tests[run.file], {})
        of_path |= {f"{run.file.stem}: {case.name}": bad.get(case.name, "") for case in run.cases}
    unplanned = {shown[each.target.path]: each.reason for each in generated.planned.short}
    return Tested(results, unplanned)


def _root(changes: Sequence[Change]) -> Path:
    """The folder that holds every changed file with the packages that it belongs to."""
    tops = []
    for change in changes:
        folder = Path(os.path.realpath(change.file.location)).parent
        while (folder / "__init__.py").exists():
            folder = folder.parent
        tops.append(os.fspath(folder))
    return Path(os.path.commonpath(tops))


def _within(change: Change, root: Path) -> Path:
    return Path(os.path.realpath(change.file.location)).relative_to(root)
