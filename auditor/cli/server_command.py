"""`poolaudit server`."""

import os
import sys
from typing import BinaryIO

import click

from auditor.cli.manual import CACHE, SETTINGS, manual

MANUAL = manual(
    {
        "poolaudit server": "As an editor starts it; see docs/editors.md.",
        "pip install 'poolaudit[server]'": "What it needs beside the command.",
    },
    SETTINGS | CACHE,
)


@click.command("server", epilog=MANUAL)
def command() -> int:
    """Serve an editor: diagnostics as you type, fixes as code actions, rule pages on hover.

    Speaks the language server protocol on standard input and output until the editor ends it; it is started
    by editors, not by hand. docs/editors.md has the settings for VS Code, Neovim, Helix and Emacs.

    Open documents count as they are in the editor, saved or not; everything else of the workspace as it lies
    on disk. Settings are read from poolaudit.toml or pyproject.toml again whenever they change. Needs the
    extra `server`: pip install 'poolaudit[server]'.

    \b
    Exit status:
      0  the editor ended it
      2  the extra is not installed, or an internal error
    """
    try:
        from auditor.server.features import make_server
    except ModuleNotFoundError as error:
        if error.name not in ("pygls", "lsprotocol"):
            raise
        raise click.ClickException(
            f"the editor server needs {error.name}: pip install 'poolaudit[server]'"
        ) from error
    server = make_server()
    try:
        server.start_io(stdout=_own_stdout())
    finally:
        server.analyst.stop()
    return 0


def _own_stdout() -> BinaryIO:
    """Standard output for the protocol alone: whatever else is printed goes to standard error."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream
