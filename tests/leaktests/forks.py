"""Runs functions in forks of a process that has imported torch and frozen its objects, as the gate runs files
of tests: each starts fresh, and none imports torch again.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.leaktests.sweep import PROJECT

SERVE = "import sys; from tests.leaktests.forks import serve; serve(sys.argv[1])"


@dataclass(frozen=True)
class Told:
    """How one ended, what it wrote, and the processor seconds of all so far."""

    status: int
    text: str
    processor_seconds: float

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of JSON that it wrote."""
        return [json.loads(line) for line in self.text.splitlines() if line.startswith("{")]


class Forks:
    """Calls functions of one module, each in a fork."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._said = process, folder / "said"

    def run(self, function: str, arguments: Sequence[object]) -> Told:
        """Call it to its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"function": function, "arguments": list(arguments), "said": str(self._said)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        status, seconds = json.loads(self._process.stdout.readline())
        return Told(status, self._said.read_text(errors="replace"), seconds)


@contextmanager
def forks(module: str, environment: Mapping[str, str]) -> Iterator[Forks]:
    """The process that forks, ended with the block."""
    command = [sys.executable, "-c", SERVE, module]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, env=environment, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        yield Forks(process, Path(folder))
        assert process.stdin is not None
        process.stdin.close()


def serve(module: str) -> None:
    """Fork for every line of standard input."""
    functions = import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _call(getattr(functions, request["function"]), request)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it started and left behind
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), flush=True)


def _call(function: Any, request: dict[str, Any]) -> None:
    """The child: standard streams of its own, and no way back."""
    status = 70
    try:
        os.setsid()
        said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(said, stream)
        function(*request["arguments"])
        sys.stdout.flush()
        status = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)  # threads that never end have no say
