"""`python -m auditor.leaktests.probe`: imports torch once, then runs each job in a fork of its own.

A job is one line of JSON on standard input, its end (an exit status, negative for a signal) one on standard
output. Importing torch takes longer than most jobs, and a fork is as fresh as a new process: nothing of a
target was imported before it.
"""

import faulthandler
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from auditor.leaktests.jobs import Job
from auditor.leaktests.probe import inquiry, results, testing

PATIENCE = 1.0
"""Seconds for processes that were killed to be gone."""


def main() -> None:
    """Serve until standard input ends."""
    testing.make_ready()
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        child = os.fork()
        if child == 0:
            _work(job)
        print(_status(child, job.limit), flush=True)


def _work(job: Job) -> None:
    """The child: streams of its own, a process group of its own, and no way back."""
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        said = os.open(job.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(null, 0)
        os.dup2(said, 1)
        os.dup2(said, 2)
        faulthandler.enable()
        if job.asks_for_cuda:
            status = 0 if torch.cuda.is_available() else 1
        elif job.request:
            os.chdir(Path(job.request).parent)  # what the target writes is thrown away with it
            answer = results.answer if job.replays else inquiry.answer
            status = answer(Path(job.request), Path(job.answers))
        else:
            status = testing.run_tests(job.arguments, job.limit, job.device)
    finally:
        sys.stderr.flush()
        os._exit(status)  # threads and exit handlers of the target have no say


def _status(child: int, limit: float) -> int:
    """How the child ended. What its own watch cannot end is killed here, with all that it started."""
    deadline = time.monotonic() + limit
    pause = 0.002
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    _end_all(child)
    return os.waitstatus_to_exitcode(status)


def _end_all(group: int) -> None:
    """Kill what a job left behind, and wait until it is gone: it may write where the caller tidies up."""
    deadline = time.monotonic() + PATIENCE
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.01)


if __name__ == "__main__":
    main()
