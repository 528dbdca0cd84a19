"""What `poolaudit leaktests` does once its options are read: audit, plan, write, say what has no plan."""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from auditor.cli.auditing import start
from auditor.cli.progress import ProgressBar
from auditor.engine import Request, audit
from auditor.leaktests.generate import Generated, Order, generate
from auditor.leaktests.plan import Plan, Recipe, Unplanned
from auditor.leaktests.recipes import drafts, read_recipes
from auditor.leaktests.workshop import workshop
from auditor.model import Failure
from auditor.settings_file import Effective, effective
from auditor.source.discover import discover

PLANNED, SHORT, FAILED = 0, 1, 2
_KINDS = {
    "module": "modules",
    "autograd": "autograd functions",
    "function": "functions of tensors",
    "code": "other places with findings",
}


@dataclass(frozen=True, slots=True)
class LeakTestOptions:
    """The options of `leaktests`, by the names they have on the command line."""

    paths: tuple[str, ...]
    output: Path
    recipes: Path | None
    write_recipes: Path | None
    timeout: float
    config: Path | None
    isolated: bool
    verbose: bool
    quiet: bool
    no_progress: bool


def run_leaktests(options: LeakTestOptions) -> int:
    """Plan and write; the exit status."""
    settings = effective(start(options.paths), config=options.config, isolated=options.isolated)
    recipes = recipes_of(options.recipes, settings)
    found = discover(options.paths, root=str(settings.root), exclude=settings.settings.exclude)
    with workshop() as shop, ProgressBar(shown=not (options.quiet or options.no_progress)) as progress:
        audited = audit(Request(options.paths, settings.settings, settings.root, progress=progress.advance))
        order = Order(
            found.files,
            audited.selected,
            options.output,
            recipes,
            seconds=options.timeout,
            progress=progress.advance,
        )
        generated = generate(order, shop)
    if options.write_recipes:
        _write_drafts(options.write_recipes, generated)
    failures = (*found.failures, *generated.failures)
    _tell(generated, failures, options)
    if failures:
        return FAILED
    return SHORT if generated.planned.short else PLANNED


def recipes_of(file: Path | None, settings: Effective) -> Mapping[str, Recipe]:
    """From --recipes, else from the file that the settings name."""
    chosen = file or settings.recipes
    return read_recipes(chosen) if chosen else {}


def _write_drafts(file: Path, generated: Generated) -> None:
    wanted = [entry for entry in generated.planned.unplanned if not entry.abstract]
    if not wanted:
        click.echo("poolaudit: every target has a plan: there are no recipes to draft", err=True)
    elif file.exists():
        raise click.UsageError(f"--write-recipes {file}: exists, and may hold your work; name another file")
    else:
        file.write_text(drafts(wanted), "utf-8")
        click.echo(f"poolaudit: {len(wanted)} recipes to complete in {file}", err=True)


def _tell(generated: Generated, failures: tuple[Failure, ...], options: LeakTestOptions) -> None:
    planned, written = generated.planned, generated.written
    if options.verbose:
        for plan in planned.plans:
            click.echo(f"{plan.target.path}:{plan.target.line}: {plan.target.name}: {_described(plan)}")
    for entry in planned.unplanned:
        if entry.target.kind in ("module", "autograd") or options.verbose:
            _tell_unplanned(entry, verbose=options.verbose)
    for file in written.kept:
        click.echo(f"{file}: changed by hand, so it was left as it is; delete it to have it written anew")
    for key in generated.unknown:
        click.echo(f"poolaudit: warning: a recipe names {key}, which is not there", err=True)
    for failure in failures:
        click.echo(f"{failure.path}:{failure.line}: {failure.message}", err=True)
    if not options.quiet:
        sys.stderr.write(summary(generated, options.output))


def _described(plan: Plan) -> str:
    build = ", ".join(argument.text for argument in plan.build)
    feed = ", ".join(argument.text for argument in plan.feed)
    return f"{plan.target.name}({build})({feed})"


def _tell_unplanned(entry: Unplanned, *, verbose: bool) -> None:
    target = entry.target
    word = "nothing to test" if entry.abstract else "no plan"
    click.echo(f"{target.path}:{target.line}: {target.name}: {word}: {entry.reason}")
    for attempt in entry.attempts if verbose or entry.reason.endswith("follows") else ():
        click.echo(f"    {attempt}")


def summary(generated: Generated, folder: Path) -> str:
    """Counts by kind, and what was written."""
    planned, written = generated.planned, generated.written
    have = Counter(plan.target.kind for plan in planned.plans)
    lack = Counter(entry.target.kind for entry in planned.unplanned if not entry.abstract)
    counts = [
        f"{have[kind]} of {have[kind] + lack[kind]} {words}"
        for kind, words in _KINDS.items()
        if have[kind] + lack[kind]
    ]
    lines = [f"Plans for {', '.join(counts) if counts else 'nothing: no targets were found'}."]
    if written.files:
        told = f"{len(written.fresh)} written, {len(written.unchanged)} unchanged"
        told += f", {len(written.kept)} left as changed by hand" if written.kept else ""
        lines.append(f"{told} in {folder}; run them with: pytest {folder}")
    if lack:
        lines.append("What has no plan can be given one: --write-recipes FILE drafts recipes to complete.")
    return "".join(f"{line}\n" for line in lines)
