"""A whole run of `adopt`: classes chosen, rewritten in memory, checked, and written all together or not."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from auditor.adopt.adoption import Adopter, Fate, Outcome
from auditor.adopt.candidates import named, wanting
from auditor.adopt.draft import Refused
from auditor.adopt.edits import edits
from auditor.adopt.project import Found, read_project
from auditor.adopt.vendor import Vendored, standard
from auditor.atomic import write_atomically
from auditor.fixes.apply import parses
from auditor.fixes.diff import unified
from auditor.fixes.document import Document
from auditor.fixes.write import Change, grouped, write_all
from auditor.model import Failure
from auditor.source.discover import SourceFile, discover, shown


@dataclass(frozen=True)
class Order:
    """What to adopt. `classes` empty: every module that ought to use a pool."""

    paths: tuple[str, ...]
    classes: tuple[str, ...] = ()
    vendor: bool = False
    root: str = "."
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """What a run would do. `copies` are files that it would make, `groups` paths that change together."""

    outcomes: tuple[Outcome, ...]
    changes: tuple[Change, ...]
    copies: dict[Path, bytes]
    failures: tuple[Failure, ...]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        return [each.paths for each in self.outcomes if each.paths]

    @property
    def refused(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.fate is Fate.REFUSED]


def plan(order: Order) -> Planned:
    """Everything but writing. Raises NoSuchPath and UnknownClass."""
    discovered = discover(order.paths, root=order.root, exclude=order.exclude)
    found = read_project(discovered.files, named=frozenset(order.paths))
    project = found.project
    chosen = named(project, order.classes) if order.classes else wanting(project)
    vendored = Vendored(found.files)
    adopter = Adopter(project, vendored if order.vendor else standard)
    asked = [adopter.adopt(each) for each in chosen]
    brought = [each for each in adopter.outcomes.values() if each.fate is Fate.ADOPTED]
    outcomes = list({id(each): each for each in [*asked, *brought]}.values())
    return Planned(
        outcomes=tuple(sorted(outcomes, key=lambda each: each.entry.span)),
        changes=tuple(_changes(found)),
        copies=vendored.copies if any(each.edits for each in outcomes) else {},
        failures=(*discovered.failures, *found.failures),
    )


def _changes(found: Found) -> Iterator[Change]:
    for path, draft in sorted(found.project.drafts.items()):
        before = found.project.documents[path]
        if changed := edits(before, draft):
            after = before.edited(changed)
            if not parses(after) or after.text.split() != "\n".join(draft.lines).split():
                raise Refused(f"{path} would not be what was planned")
            yield Change(found.files[path], before, after)


@dataclass(frozen=True)
class Done:
    """What was written, and why the rest was not."""

    written: tuple[str, ...]
    refused: dict[str, str]


def write(planned: Planned) -> Done:
    """Write what was planned; a class whose files cannot all be written leaves all of them as they are."""
    made = []
    for target, data in planned.copies.items():
        write_atomically(target, data)
        made.append(target)
    written = write_all(planned.changes, planned.groups)
    if not written.paths:
        for target in made:
            target.unlink()
        made = []
    paths = (*written.paths, *(shown(os.fspath(target)) for target in made))
    return Done(paths, dict(written.refused))


def left(planned: Planned, done: Done) -> Planned:
    """The outcomes with those refused whose files could not be written."""
    outcomes: list[Outcome] = []
    for each in planned.outcomes:
        why = next((done.refused[path] for path in each.paths if path in done.refused), None)
        if each.fate is Fate.ADOPTED and why is not None:
            each = replace(each, fate=Fate.REFUSED, reason=f"its file {why}")
        outcomes.append(each)
    return replace(planned, outcomes=tuple(outcomes))


def diff(planned: Planned) -> str:
    """The changes as `git apply` takes them, new files included."""
    return "".join(unified(change.before, change.after) for change in with_copies(planned))


def with_copies(planned: Planned) -> list[Change]:
    """The changes, those that make a new file included: it was empty before."""
    made = []
    for target, data in sorted(planned.copies.items()):
        location = os.fspath(target)
        path = shown(location)
        made.append(Change(SourceFile(path, location), Document(path, b""), Document(path, data)))
    return [*planned.changes, *made]


def without(planned: Planned, refused: Mapping[str, str]) -> Planned:
    """What is left of a plan when some of its files must stay as they are, and all that hang on them."""
    groups = grouped([change.file.path for change in planned.changes], planned.groups)
    stay = {path for bad in refused for path in groups.get(bad, {bad})}
    reasons = {path: refused.get(path, "hangs together with a file that must stay as it is") for path in stay}
    changes = tuple(change for change in planned.changes if change.file.path not in stay)
    copies = planned.copies if changes else {}
    return left(replace(planned, changes=changes, copies=copies), Done((), reasons))
