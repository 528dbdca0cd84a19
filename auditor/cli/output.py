"""Where reports go: formats found by listing the reports folder, standard output, or files written whole."""

import importlib
import os
import pkgutil
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import click

from auditor.atomic import write_atomically
from auditor.model import Run

NARROW = 80


@dataclass(frozen=True, slots=True)
class Target:
    """One report to write; `file=None` is standard output."""

    format: str
    file: Path | None


def formats() -> tuple[str, ...]:
    """The names of the modules in the `reports` folder."""
    import reports

    return tuple(sorted(m.name for m in pkgutil.iter_modules(reports.__path__) if not m.name.startswith("_")))


def targets(chosen: Sequence[str], outputs: Sequence[str]) -> list[Target]:
    """Match --format and --output: `FILE` serves the only format, `FORMAT=FILE` adds or redirects one."""
    known = formats()
    files: dict[str, Path] = {}
    plain: Path | None = None
    for output in outputs:
        name, separator, file = output.partition("=")
        if separator and name in known:
            if name in files:
                raise click.UsageError(f"--output {name}=... is given twice")
            files[name] = Path(file)
        elif plain is not None:
            raise click.UsageError("--output FILE is given twice; write --output FORMAT=FILE once a format")
        else:
            plain = Path(output)
    wanted = list(dict.fromkeys([*chosen, *files])) or ["full"]
    unplaced = [name for name in wanted if name not in files]
    if plain is not None and len(unplaced) != 1:
        raise click.UsageError(f"--output {plain}: which format? write --output FORMAT={plain}")
    return [Target(name, files.get(name, plain)) for name in wanted]


def show_effort(wanted: Sequence[Target]) -> bool:
    """Whether one of these reports says how many edits `adopt` would make."""
    modules = [importlib.import_module(f"reports.{target.format}") for target in wanted]
    return any(getattr(module, "SHOWS_EFFORT", False) for module in modules)


def write(run: Run, target: Target, *, color: str) -> None:
    """Render `run` and put it where `target` says."""
    render: Callable[..., str] = importlib.import_module(f"reports.{target.format}").render
    if target.file is None:
        sys.stdout.write(render(run, color=colored(color, sys.stdout), width=width()))
        return
    text = render(run, color=color == "always", width=NARROW)
    try:
        write_atomically(target.file, text.encode("utf-8", "replace"))
    except OSError as error:
        raise click.UsageError(f"--output {target.file}: {error.strerror}") from error


def colored(choice: str, stream: TextIO) -> bool:
    """Whether --color `choice` means colour on `stream`."""
    if choice == "auto":
        return stream.isatty() and "NO_COLOR" not in os.environ
    return choice == "always"


def width() -> int:
    return shutil.get_terminal_size((NARROW, 24)).columns
