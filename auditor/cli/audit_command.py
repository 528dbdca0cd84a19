"""`poolaudit audit`."""

from pathlib import Path
from typing import Any

import click

from auditor.baseline import BaselineError
from auditor.changed_lines import DiffError
from auditor.cli.auditing import AuditOptions, run_audit
from auditor.cli.manual import CACHE, SETTINGS, manual
from auditor.cli.output import formats
from auditor.cli.settings_options import selection_options, settings_options, working_options
from auditor.settings_file import SettingsError
from auditor.source.discover import NoSuchPath

MANUAL = manual(
    {
        "poolaudit audit src": "Findings with their paths, and a summary.",
        "poolaudit audit src --select PA1 --format concise": "Only leaks, a line each.",
        "poolaudit audit src --statistics": "Also who uses the pool, and who should.",
        "poolaudit audit --diff-base origin/main": "Only findings on changed lines.",
        "poolaudit audit --format html --output audit.html": "A page to look at.",
    },
    SETTINGS | CACHE,
)


@click.command("audit", epilog=MANUAL)
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH ...]")
@click.option(
    "--format",
    multiple=True,
    type=click.Choice(formats()),
    help="How to report findings (default: full). Repeatable.",
)
@click.option(
    "--output",
    multiple=True,
    metavar="FILE",
    help="Write the report to FILE; with several formats, --output FORMAT=FILE for each.",
)
@selection_options("run", "Leave out findings in FILE.")
@click.option(
    "--write-baseline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write all findings to FILE as known, report none.",
)
@click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Add this run to FILE, one line of JSON a run; html shows the curve.",
)
@click.option("--exit-zero", is_flag=True, help="Exit with 0 where findings would make it 1.")
@click.option("--statistics", is_flag=True, help="Print counts by rule and the table of classes.")
@working_options
@settings_options
@click.option(
    "--verbose", is_flag=True, help="Say what was not followed, and show tracebacks of our own errors."
)
@click.option("--quiet", is_flag=True, help="Print findings and failures only.")
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
@click.option(
    "--color", type=click.Choice(["auto", "always", "never"]), default="auto", help="Colour the output."
)
def command(**options: Any) -> int:
    """Report leaked, misused and missing pool leases in the Python files under each PATH.

    PATH is a file or a folder (default: the working directory); `-` is standard input. Nothing of the audited
    code is imported or run. A file named explicitly is always audited; folders leave out .git, .venv, build,
    dist, __pycache__, what .gitignore names and the `exclude` setting.

    \b
    Exit status:
      0  nothing to report
      1  findings of severity error or warning (0 with --exit-zero)
      2  wrong use, bad settings, a file not analysed, or an internal error
    """
    try:
        return run_audit(AuditOptions(**options))
    except (SettingsError, NoSuchPath, BaselineError, DiffError) as error:
        raise click.UsageError(str(error)) from error
