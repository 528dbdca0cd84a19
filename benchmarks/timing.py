"""Runs a command and says how long it took and how much memory its largest process held."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# With the first argument as a file for figures: runs the rest, and asks the kernel about the children
# afterwards.
# RUSAGE_CHILDREN's maxrss is the largest of all descendants that were waited for, which is what a limit
# must hold.
_MEASURE = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
status = subprocess.call(sys.argv[2:])
seconds = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
peak, cpu = used.ru_maxrss, used.ru_utime + used.ru_stime
unit = 1 if sys.platform == "darwin" else 1024
json.dump({"status": status, "seconds": seconds, "cpu": cpu, "peak": peak * unit}, open(sys.argv[1], "w"))
"""

# What is installed has its bytecode; where a shell forbids writing it, every run would compile the package.
_KEEPS_BYTECODE = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float
    cpu_seconds: float  # of all its processes; on a busy machine the only figure that means something
    peak_mb: float
    output: str


class CommandFailed(RuntimeError):
    """A command that ends badly has no time worth recording."""


def run(command: list[str], stdin: str = "", accepted: tuple[int, ...] = (0,)) -> Timing:
    """Wall time of the whole process, its children included."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(figures), *command],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=Path(__file__).resolve().parent.parent,
            env={**_KEEPS_BYTECODE, "PYTHONHASHSEED": "0"},
            check=False,
        )
        measured = json.loads(figures.read_text())
    if measured["status"] not in accepted:
        raise CommandFailed(
            f"{' '.join(command[:6])} ended with {measured['status']}:\n{done.stderr[-2000:]}"
        )
    seconds, cpu = round(measured["seconds"], 3), round(measured["cpu"], 3)
    return Timing(seconds, cpu, round(measured["peak"] / 1e6, 1), done.stdout)


def python_files(tree: Path) -> list[Path]:
    return sorted(path for path in tree.rglob("*.py") if path.is_file())
