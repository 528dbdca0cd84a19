"""`poolaudit adopt`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from auditor.adopt.adoption import Fate, Outcome
from auditor.adopt.candidates import UnknownClass
from auditor.adopt.run import Order, Planned, diff, left, plan, with_copies, without, write
from auditor.cli.auditing import CLEAN, FAILED, FOUND
from auditor.cli.manual import SETTINGS, manual
from auditor.cli.settings_options import settings_options
from auditor.fixes.verify import CannotVerify, Verifier, verifier
from auditor.git_state import uncommitted
from auditor.model import Failure
from auditor.settings_file import SettingsError, effective
from auditor.source.discover import STDIN, NoSuchPath

MANUAL = manual(
    {
        "poolaudit adopt --diff src": "What would change, as a patch.",
        "poolaudit adopt --class RingAttention src": "One class, and what it needs.",
        "poolaudit adopt --mixin vendor src": "Without a dependency on reference_modules.",
    },
    SETTINGS,
)


@click.command("adopt", epilog=MANUAL)
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH ...")
@click.option(
    "--class",
    "classes",
    multiple=True,
    metavar="NAME",
    help="The class to adopt (repeatable). Without it: every module that makes large temporaries.",
)
@click.option("--diff", "only_diff", is_flag=True, help="Print what would change; write nothing.")
@click.option(
    "--verify",
    is_flag=True,
    help="Run generated leak tests and compare results with the old code's, in copies.",
)
@click.option(
    "--mixin",
    type=click.Choice(["import", "vendor"]),
    default="import",
    show_default=True,
    help="Import the mixin from reference_modules, or copy it, once a package.",
)
@settings_options
@click.option("--verbose", is_flag=True, help="Say of every tensor that stays plain memory why.")
@click.option("--quiet", is_flag=True, help="Say only what was refused.")
def command(
    paths: tuple[str, ...],
    classes: tuple[str, ...],
    only_diff: bool,
    verify: bool,
    mixin: str,
    config: Path | None,
    isolated: bool,
    verbose: bool,
    quiet: bool,
) -> int:
    """Give nn.Modules under each PATH the standard MemoryPoolMixin, and their true temporaries to its pool.

    A temporary is a tensor that does not leave the module and that autograd does not keep; everything else
    stays as it is. Bases and children that make temporaries are adopted too, and the switch is handed to
    them. It is off by default, so callers notice nothing. Nothing of the code is imported or run, unless
    --verify asks for tests; then nothing is written that did not pass them.

    \b
    Exit status:
      0  every class is adopted
      1  a class was refused (with --diff: or would change)
      2  wrong use, or a file that could not be read or parsed
    """
    if STDIN in paths:
        raise click.UsageError(
            "`-` is standard input: adopt rewrites files, with the classes that they build"
        )
    tests = _verifier() if verify else None
    try:
        settings = effective(Path(paths[0]), config=config, isolated=isolated)
        order = Order(paths, classes, mixin == "vendor", str(settings.root), settings.settings.exclude)
        planned = plan(order)
    except (SettingsError, NoSuchPath, UnknownClass) as error:
        raise click.UsageError(str(error)) from error
    if tests is not None and planned.changes:
        planned = _that_passed(planned, tests, settings.recipes)
    if only_diff:
        sys.stdout.write(diff(planned))
    elif planned.changes:
        _warn_of_uncommitted(planned)
        planned = left(planned, write(planned))
    for line in _told(planned, verbose=verbose, quiet=quiet):
        click.echo(line, err=True)
    return _status(planned, pending=only_diff and bool(planned.changes))


def _that_passed(planned: Planned, tests: Verifier, recipes: Path | None) -> Planned:
    try:
        return without(planned, tests(with_copies(planned), recipes))
    except CannotVerify as error:
        raise click.UsageError(str(error)) from error


def _verifier() -> Verifier:
    found = verifier()
    if found is None:
        raise click.UsageError("--verify needs the generator of leak tests, which is not installed")
    return found


def _warn_of_uncommitted(planned: Planned) -> None:
    unsaved = uncommitted([change.file.location for change in planned.changes])
    if unsaved:
        shown = ", ".join(change.file.path for change in planned.changes if change.file.location in unsaved)
        click.echo(f"poolaudit: warning: changes that git does not have yet are in {shown}", err=True)


def _status(planned: Planned, *, pending: bool) -> int:
    if planned.failures:
        return FAILED
    return FOUND if planned.refused or pending else CLEAN


def _told(planned: Planned, *, verbose: bool, quiet: bool) -> Iterator[str]:
    for failure in planned.failures:
        yield f"poolaudit: {_place(failure)}: {failure.message}"
    for outcome in planned.outcomes:
        if not quiet or outcome.fate is Fate.REFUSED:
            yield from _of_one(outcome, verbose=verbose)
    if quiet:
        return
    if not planned.outcomes:
        yield "No module here makes a large temporary; --class NAME adopts a class nevertheless."
        return
    counts = {fate: sum(each.fate is fate for each in planned.outcomes) for fate in Fate}
    yield ", ".join(f"{number} {fate}" for fate, number in counts.items() if number) + "."


def _place(failure: Failure) -> str:
    return f"{failure.path}:{failure.line}" if failure.line else failure.path


def _of_one(outcome: Outcome, *, verbose: bool) -> Iterator[str]:
    entry = outcome.entry
    where = f"{entry.span.path}:{entry.span.line} {entry.qualname}"
    match outcome.fate:
        case Fate.ADOPTED:
            leases = sum(each.startswith("lease ") for each in outcome.edits)
            pooled = _count(leases, "temporary", "temporaries")
            yield f"adopted  {where}: {pooled}, {_count(len(outcome.edits), 'edit', 'edits')}"
        case Fate.ALREADY:
            yield f"already  {where}: adopted, nothing to do"
        case Fate.REFUSED:
            yield f"refused  {where}: {outcome.reason}"
    for note in outcome.notes:
        yield f"         {note}"
    if verbose or outcome.fate is Fate.REFUSED:
        for kept in outcome.kept:
            yield f"         line {kept.line}: {kept.made_by} stays plain memory: {kept.reason}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
