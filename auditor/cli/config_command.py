"""`poolaudit config`."""

from pathlib import Path

import click
import msgspec

from auditor.cli.manual import SETTINGS, manual
from auditor.cli.settings_options import settings_options
from auditor.settings_file import SettingsError, effective

MANUAL = manual(
    {
        "poolaudit config": "The settings here.",
        "poolaudit config src/vendored": "Those of another folder.",
        "poolaudit config --isolated": "What holds where nothing is set.",
    },
    SETTINGS,
)


@click.command("config", epilog=MANUAL)
@click.argument("path", default=".", type=click.Path(path_type=Path))
@settings_options
def command(path: Path, config: Path | None, isolated: bool) -> int:
    """Print the settings that hold for PATH (default: the working directory), and where each came from.

    The values are JSON; `null` for select means the rules that are on by default.

    \b
    Exit status:
      0  the settings were printed
      2  wrong use or bad settings
    """
    try:
        found = effective(path, config=config, isolated=isolated)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    values = msgspec.to_builtins(found.settings)
    shown = {key: msgspec.json.encode(values[key]).decode() for key in found.origins}
    widest = max(len(f"{key} = {value}") for key, value in shown.items())
    for key, value in shown.items():
        click.echo(f"{f'{key} = {value}':{min(widest, 60)}}  # {found.origins[key]}")
    return 0
