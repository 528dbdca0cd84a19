"""`poolaudit leaktests`."""

from pathlib import Path
from typing import Any

import click

from auditor.cli.manual import SETTINGS, manual
from auditor.cli.settings_options import recipes_option, settings_options
from auditor.settings_file import SettingsError
from auditor.source.discover import NoSuchPath

MANUAL = manual(
    {
        "poolaudit leaktests src/attention": "Tests of every module under it.",
        "poolaudit leaktests src --write-recipes recipes.toml": "Draft what cannot be guessed.",
        "pytest tests/generated": "Run them.",
    },
    SETTINGS | {"tests/generated/": "The tests, and leak_support beside them."},
)


@click.command("leaktests", epilog=MANUAL)
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH ...")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("tests/generated"),
    metavar="DIR",
    help="Where the tests are written (default: tests/generated).",
)
@recipes_option
@click.option(
    "--write-recipes",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draft recipes for what has no plan into FILE, to be completed; an existing FILE is left alone.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=30.0,
    metavar="SECONDS",
    help="How long one target may take while it is planned (default: 30).",
)
@settings_options
@click.option("--verbose", is_flag=True, help="Show every plan and every attempt, and our own tracebacks.")
@click.option("--quiet", is_flag=True, help="Say only what has no plan.")
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
def command(**options: Any) -> int:
    """Write pytest leak tests for the modules, autograd functions and functions of tensors under each PATH.

    THIS RUNS THE CODE under PATH: every file with a target is imported and its targets are called, each file
    in a process of its own. Run it on code that you would run anyway. The tests need torch, pytest, the
    module, and the folder leak_support that is written beside them. A test file that was changed by hand is
    not written over.

    \b
    Exit status:
      0  every module has a plan, or a recipe that leaves it out
      1  a module has none: each is named with the reason
      2  wrong use, torch missing, a file not read, or an internal error
    """
    from auditor.cli.leaktesting import LeakTestOptions, run_leaktests
    from auditor.leaktests.recipes import RecipeError
    from auditor.leaktests.workshop import WorkshopError

    try:
        return run_leaktests(LeakTestOptions(**options))
    except (SettingsError, NoSuchPath, RecipeError) as error:
        raise click.UsageError(str(error)) from error
    except WorkshopError as error:
        raise click.ClickException(str(error)) from error
