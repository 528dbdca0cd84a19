"""The process in which targets run: started once, it holds torch ready and forks for every job."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from auditor.leaktests.jobs import Job

TORCH_MISSING = "torch is not installed: pip install 'poolaudit[torch]' (or torch for your CUDA version)"

_NO_SPARE_CHUNKS = "glibc.malloc.tcache_count=0"
"""Freed chunks that malloc keeps ready hide which call a leak of C's heap is in, and whether there is one."""


class WorkshopError(Exception):
    """Nothing can be run here; the message says what to install or what went wrong."""


class Workshop:
    """Runs jobs in forks of a process that has imported torch."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def run(self, job: Job) -> int:
        """Run one job to its end: its exit status, negative where a signal ended it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # said below, where its end is read
        line = self._process.stdout.readline()
        if not line:
            raise WorkshopError(f"the process that runs targets ended with status {self._process.wait()}")
        return int(line)

    def device(self, wanted: str) -> str:
        """`auto` is cuda where there is one. Raises WorkshopError for a cuda that is not there."""
        if wanted == "cpu":
            return wanted
        there = self.run(Job(os.devnull, 120.0, asks_for_cuda=True)) == 0
        if wanted == "cuda" and not there:
            raise WorkshopError("--device cuda: torch sees no CUDA device here; use --device cpu or auto")
        return "cuda" if there else "cpu"


@contextmanager
def workshop() -> Iterator[Workshop]:
    """A workshop, closed at the end of the block. Raises WorkshopError where there is no torch."""
    if not hasattr(os, "fork"):
        raise WorkshopError(
            "leak tests run in forked processes, which this system has not: use Linux or macOS"
        )
    _need("torch", TORCH_MISSING)
    command = [sys.executable, "-m", "auditor.leaktests.probe"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=gate_environment())
    try:
        yield Workshop(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def need_pytest() -> None:
    """Raises WorkshopError where generated tests could not be run."""
    _need("pytest", "pytest is not installed: pip install 'poolaudit[pytest]'")


def _need(module: str, message: str) -> None:
    """Looked up, not imported: importing torch takes seconds, and is not ours to do."""
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise WorkshopError(message)


def gate_environment() -> dict[str, str]:
    """What targets run in: ours, with our own folder to import from: a checkout may not be installed."""
    here = os.fspath(Path(__file__).parent.parent.parent)
    paths = [here, os.environ.get("PYTHONPATH", "")]
    # torch's own setting is for one thread: each that code under test starts would have a team of its own
    usual = {"GLIBC_TUNABLES": _NO_SPARE_CHUNKS, "OMP_NUM_THREADS": "1", **os.environ}
    return {**usual, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
