"""Options that choose and override settings, and the errors of settings as wrong use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from auditor.cache import DIRECTORY
from auditor.cli.completion import rule_codes

_FILE = click.Path(path_type=Path)
_EXCEPTIONS = "Which raising edges count: none, raise and assert, or every call too (default: calls)."
_DIFF_BASE = "Only findings on lines changed since the git revision REV."
Command = TypeVar("Command", bound=Callable[..., Any])


def settings_options(command: Command) -> Command:
    """--config and --isolated."""
    command = click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Take settings from FILE instead of the nearest poolaudit.toml or pyproject.toml.",
    )(command)
    return click.option("--isolated", is_flag=True, help="Read no settings file at all.")(command)


def selection_options(doing: str, known: str) -> Callable[[Command], Command]:
    """Which findings: --select, --ignore, --exceptions, --baseline and --diff-base; `doing` and `known` are
    the words of the help."""

    def add(command: Command) -> Command:
        for option in (
            click.option("--diff-base", metavar="REV", help=_DIFF_BASE),
            click.option("--baseline", type=_FILE, metavar="FILE", help=known),
            click.option("--exceptions", type=click.Choice(["none", "explicit", "calls"]), help=_EXCEPTIONS),
            click.option(
                "--ignore",
                multiple=True,
                metavar="CODES",
                shell_complete=rule_codes,
                help=f"Rules not to {doing}: codes or prefixes.",
            ),
            click.option(
                "--select",
                multiple=True,
                metavar="CODES",
                shell_complete=rule_codes,
                help=f"Rules to {doing}: codes, prefixes (PA1) or ALL.",
            ),
        ):
            command = option(command)
        return command

    return add


def working_options(command: Command) -> Command:
    """How the work is done: --jobs, --no-cache and --cache-dir."""
    for option in (
        click.option(
            "--cache-dir",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help=f"Where the cache lives (default: {DIRECTORY} beside the settings file).",
        ),
        click.option("--no-cache", is_flag=True, help="Neither read nor write the cache."),
        click.option(
            "--jobs", type=click.IntRange(min=1), metavar="N", help="Worker processes (default: one a CPU)."
        ),
    ):
        command = option(command)
    return command


def recipes_option(command: Command) -> Command:
    """--recipes, of the commands that run code."""
    return click.option(
        "--recipes",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="How to build and feed what cannot be guessed (default: the `recipes` setting).",
    )(command)


def codes(values: tuple[str, ...]) -> tuple[str, ...]:
    """`PA1,PA301` and repeated options alike, as one tuple."""
    return tuple(code.strip() for value in values for code in value.split(",") if code.strip())
