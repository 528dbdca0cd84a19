"""`poolaudit gate`."""

from typing import Any

import click

from auditor.baseline import BaselineError
from auditor.changed_lines import DiffError
from auditor.cli.manual import CACHE, SETTINGS, manual
from auditor.cli.output import formats
from auditor.cli.settings_options import (
    recipes_option,
    selection_options,
    settings_options,
    working_options,
)
from auditor.settings_file import SettingsError
from auditor.source.discover import NoSuchPath

MANUAL = manual(
    {
        "poolaudit gate src": "One verdict, on the CPU or the GPU that there is.",
        "poolaudit gate src --diff-base origin/main": "Findings on changed lines only.",
        "poolaudit gate src --output junit=gate.xml": "For a build server.",
    },
    SETTINGS | CACHE,
)


@click.command("gate", epilog=MANUAL)
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH ...]")
@click.option(
    "--format", multiple=True, type=click.Choice(formats()), help="How to report findings. Repeatable."
)
@click.option(
    "--output",
    multiple=True,
    metavar="FILE",
    help="Write the report to FILE, or --output FORMAT=FILE for each format; junit holds the tests too.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Where leak tests run (default: auto).",
)
@recipes_option
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=120.0,
    metavar="SECONDS",
    help="How long the tests of one target may take (default: 120).",
)
@selection_options("run", "Leave out findings in FILE.")
@working_options
@settings_options
@click.option(
    "--verbose", is_flag=True, help="Say what every test and every attempt came to, and our own tracebacks."
)
@click.option("--quiet", is_flag=True, help="Print findings and the verdict only.")
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
@click.option(
    "--color", type=click.Choice(["auto", "always", "never"]), default="auto", help="Colour the output."
)
def command(**options: Any) -> int:
    """Give one verdict on each PATH: the audit is clean, no safe fix is outstanding, the leak tests pass.

    THIS RUNS THE CODE under PATH, each file in a process of its own, as `poolaudit leaktests` does; the tests
    are written to a temporary folder. Findings then say whether a test reproduced them, and later audits
    repeat that (docs/gate.md).

    \b
    Exit status:
      0  the verdict is good
      1  findings, outstanding safe fixes, failed tests, a module without a plan
      2  wrong use, torch or pytest missing, a file not analysed, internal error
    """
    from auditor.cli.gating import GateOptions, run_gate
    from auditor.leaktests.recipes import RecipeError
    from auditor.leaktests.workshop import WorkshopError

    device, recipes, timeout = (options.pop(name) for name in ("device", "recipes", "timeout"))
    try:
        return run_gate(GateOptions(options, device, recipes, timeout))
    except (SettingsError, NoSuchPath, BaselineError, DiffError, RecipeError) as error:
        raise click.UsageError(str(error)) from error
    except WorkshopError as error:
        raise click.ClickException(str(error)) from error
