"""The command line: one small file a command, imported only when that command is used."""

import importlib
import io
import os
import sys
import traceback

import click

from auditor import __version__

COMMANDS = {
    "adopt": "Give nn.Modules the standard mixin, and their temporaries to its pool.",
    "audit": "Report findings.",
    "fix": "Apply the fixes of findings.",
    "config": "Print the effective settings and where each came from.",
    "gate": "Audit, outstanding fixes, generated leak tests: one verdict. This runs the code.",
    "leaktests": "Write pytest leak tests for modules. This runs their code.",
    "rule": "Explain a rule: what, why, bad, good.",
    "server": "Serve an editor: diagnostics as you type.",
}
TASKS = {
    "Find out": ("audit", "rule"),
    "Repair": ("fix", "adopt"),
    "Prove": ("leaktests", "gate"),
    "Set up": ("config", "server"),
}
"""The order in which one meets them."""
WRONG_USE = 2
INTERRUPTED = 130  # as shells say it: 128 + SIGINT
BROKEN_PIPE = 141


class _Commands(click.Group):
    """Finds a command's module by its name; the one-line helps are here so that --help imports nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"auditor.cli.{name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By task; aligned over all of them."""
        widest = max(map(len, COMMANDS))
        for task, names in TASKS.items():
            with formatter.section(task):
                known = (name for name in names if name in COMMANDS)
                formatter.write_dl([(name.ljust(widest), COMMANDS[name]) for name in known])


@click.command(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, subcommand_metavar="COMMAND ..."
)
@click.version_option(__version__, prog_name="poolaudit")
def poolaudit() -> None:
    """Find, explain and prove away memory-pool leaks in Python code, without running it.

    \b
    Exit status:
      0  nothing to report
      1  findings of severity error or warning
      2  wrong use, bad settings, a file not analysed, or an internal error
    """


def main() -> None:
    """Run the command line and exit with its status; what we did not foresee is one line and status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a console that cannot show a character shows its escape
            stream.reconfigure(errors="backslashreplace")
    if "_POOLAUDIT_COMPLETE" in os.environ:
        importlib.import_module("auditor.cli.fish_completion")
    try:
        status = poolaudit(prog_name="poolaudit", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        status = WRONG_USE
    except (click.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        status = BROKEN_PIPE
    except Exception as error:
        _confess(error)
        status = WRONG_USE
    sys.exit(status)


def _confess(error: Exception) -> None:
    if "--verbose" in sys.argv:
        traceback.print_exc()
    first, *_ = str(error).splitlines() or [""]
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    click.echo(f"poolaudit: internal error: {said} (--verbose shows where)", err=True)
