"""Whether changed files compute what they did and pass their leak tests: `--verify` of fix and adopt.

The tree is copied twice, with and without the changes, and only the copies are run. A change stands if every
generated test of its file passes, and if what the tests are about gives the same results in both copies, to
the bit. What the tests said of the file before is part of the reason if one fails.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from auditor.fixes.verify import CannotVerify
from auditor.fixes.write import Change
from auditor.leaktests.generate import Order, generate
from auditor.leaktests.plan import Plan, Recipe
from auditor.leaktests.recipes import RecipeError, read_recipes
from auditor.leaktests.render import file_name
from auditor.leaktests.running import Case, TestOrder, run_files
from auditor.leaktests.sameness import Versions, changed_results
from auditor.leaktests.workshop import Workshop, WorkshopError, workshop
from auditor.source.discover import SourceFile, discover

Recipes = Mapping[str, Recipe]
UNPLANNED = "no leak test could be planned for it; a recipe may help (docs/leaktests.md)"
TREE = "tree"
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".poolaudit_cache", "node_modules")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests of one file said, None where there was none; and how it is built and fed."""

    cases: tuple[Case, ...] | None
    plans: tuple[Plan, ...] = ()

    @property
    def bad(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases or () if case.outcome in ("failed", "error"))


def verify(changes: Sequence[Change], recipes: Path | None = None) -> Mapping[str, str]:
    """Why each path must stay as it is; paths whose tests pass are not in it. Raises CannotVerify."""
    try:
        return _verify(changes, read_recipes(recipes) if recipes else {})
    except (WorkshopError, RecipeError) as error:
        raise CannotVerify(str(error)) from error


def _verify(changes: Sequence[Change], recipes: Recipes) -> Mapping[str, str]:
    with workshop() as shop, tempfile.TemporaryDirectory(prefix="poolaudit-verify-") as scratch:
        now = _verdicts(changes, Copy(Path(scratch) / "after", recipes, changed=True), shop)
        doubtful = [change for change in changes if now[change.file.path].bad]
        plain = Copy(Path(scratch) / "before", recipes, changed=False)
        then = _verdicts(doubtful, plain, shop) if doubtful else {}
        refused = {path: UNPLANNED for path, verdict in now.items() if verdict.cases is None}
        for path, before in then.items():
            refused[path] = _reason(now[path].bad[0], before)
        sound = [plan for path, verdict in now.items() if path not in refused for plan in verdict.plans]
        return refused | _changed(sound, changes, Path(scratch), shop)


def _changed(
    plans: Sequence[Plan], changes: Sequence[Change], scratch: Path, shop: Workshop
) -> dict[str, str]:
    """The paths of which the results are not what they were."""
    versions = Versions(scratch / "unchanged", scratch / "after")
    if plans:
        _copied(changes, versions.before, changed=False)
    return changed_results(plans, versions, shop)


def _reason(failed: Case, before: Verdict) -> str:
    line = (failed.message.splitlines() or [failed.outcome])[0]
    as_before = any(case.name == failed.name for case in before.bad)
    return f"its leak test {failed.name} fails{', as it did before' if as_before else ''}: {line}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Where the tree is copied to, with the changes or without, and how to build what cannot be guessed."""

    folder: Path
    recipes: Recipes
    changed: bool


def _verdicts(changes: Sequence[Change], order: Copy, shop: Workshop) -> dict[str, Verdict]:
    """The tests of every changed file, run on a copy of the tree."""
    folder, copy = order.folder, order.folder / TREE
    files = _copied(changes, folder, changed=order.changed)
    own = {file.location for file in files}
    around = [
        file for file in discover((os.fspath(copy),), root=os.fspath(copy)).files if file.location not in own
    ]
    generated = generate(Order(files, (), folder / "tests", order.recipes, around=around), shop)
    plans = {folder / "tests" / file_name(plan): plan for plan in generated.planned.plans}
    found: dict[str, Verdict] = {file.path: Verdict(None) for file in files}
    for run in run_files(TestOrder(sorted(plans)), shop):
        plan = plans[run.file]
        earlier = found[plan.target.path]
        found[plan.target.path] = Verdict((*(earlier.cases or ()), *run.cases), (*earlier.plans, plan))
    return found


def _copied(changes: Sequence[Change], folder: Path, *, changed: bool) -> list[SourceFile]:
    """The changed files in a copy of the tree that they are part of."""
    top = _top(change.file.location for change in changes)
    copy = folder / TREE
    shutil.copytree(top, copy, ignore=_NOT_COPIED, symlinks=True, ignore_dangling_symlinks=True)
    files = []
    for change in changes:
        place = copy / os.path.relpath(os.path.realpath(change.file.location), top)
        if changed:
            place.write_bytes(change.after.data)
        files.append(SourceFile(change.file.path, os.fspath(place)))
    return files


def _top(locations: Iterable[str]) -> Path:
    """The folder that holds the packages of all files: what has to be copied to import any of them."""
    roots = []
    for location in locations:
        folder = Path(os.path.realpath(location)).parent
        while (folder / "__init__.py").exists() and folder.parent != folder:
            folder = folder.parent
        roots.append(os.fspath(folder))
    return Path(os.path.commonpath(roots))
