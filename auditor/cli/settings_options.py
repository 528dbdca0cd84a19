"""Options that choose and override settings, and the errors of settings as wrong use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

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


def codes(values: tuple[str, ...]) -> tuple[str, ...]:
    """`PA1,PA301` and repeated options alike, as one tuple."""
    return tuple(code.strip() for value in values for code in value.split(",") if code.strip())
