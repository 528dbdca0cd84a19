"""`poolaudit fix`."""

from typing import Any

import click

from auditor.baseline import BaselineError
from auditor.changed_lines import DiffError
from auditor.cli.fix_run import FixOptions, run_fix
from auditor.cli.manual import CACHE, SETTINGS, manual
from auditor.cli.settings_options import selection_options, settings_options, working_options
from auditor.fixes.verify import CannotVerify
from auditor.settings_file import SettingsError
from auditor.source.discover import NoSuchPath

MANUAL = manual(
    {
        "poolaudit fix --diff src": "What would change, as a patch.",
        "poolaudit fix src": "Apply the safe fixes.",
        "poolaudit fix --unsafe-fixes --interactive src": "Ask about each fix.",
        "poolaudit fix - < module.py": "Standard input, fixed, on standard output.",
    },
    SETTINGS | CACHE,
)


@click.command("fix", epilog=MANUAL)
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH ...]")
@click.option("--diff", is_flag=True, help="Print what would change, write nothing.")
@click.option("--unsafe-fixes", is_flag=True, help="Also fixes that may change the program's meaning.")
@click.option("--interactive", is_flag=True, help="Show each fix and ask: y, n, a (all of its rule), q.")
@click.option(
    "--verify",
    is_flag=True,
    help="Run generated leak tests and compare results with the old code's, in copies; write what passes.",
)
@selection_options("fix", "Leave findings in FILE.")
@click.option("--exit-zero", is_flag=True, help="Exit with 0 where it would be 1.")
@working_options
@settings_options
@click.option("--verbose", is_flag=True, help="List every finding that stays, and tracebacks of our errors.")
@click.option("--quiet", is_flag=True, help="Print only what failed.")
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
def command(**options: Any) -> int:
    """Apply the fixes of findings in the Python files under each PATH.

    PATH is a file or a folder (default: the working directory); with `-` standard input is fixed and printed
    on standard output. Every fix is analysed again before it is written: the finding must be gone and no
    other one may have come. A file is written whole or not at all, and only if it is still what was analysed.

    --verify is the only option that runs the code: it generates leak tests for the modules concerned, and
    compares what old and new code make of the same inputs, bit for bit.

    \b
    Exit status:
      0  nothing left that could be fixed (with --diff: no change)
      1  a fix failed or was not written (with --diff: something would change)
      2  wrong use, bad settings, a file not analysed, or an internal error
    """
    try:
        return run_fix(FixOptions(**options))
    except (SettingsError, NoSuchPath, BaselineError, DiffError, CannotVerify) as error:
        raise click.UsageError(str(error)) from error
