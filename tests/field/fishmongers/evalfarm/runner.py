"""One program, one verdict."""
from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .sandboxes import FarmBusy, Sandbox, SandboxPool

log = logging.getLogger(__name__)


@dataclass
class Verdict:
    passed: bool
    output: str
    seconds: float = 0.0


def execute(box: Sandbox, argv: Sequence[str], stdin: str = "", limit: float = 10.0) -> subprocess.CompletedProcess:
    command = ["boxctl", str(box.port), *argv]
    return subprocess.run(command, input=stdin, text=True, capture_output=True, timeout=limit)


class Dialog:
    """An interactive problem: the program and the judge talk in turns."""

    def __init__(self, pool: SandboxPool, box: Sandbox) -> None:
        self._pool = pool
        self._box: Sandbox | None = box
        self.turns = 0

    def say(self, line: str) -> str:
        self.turns += 1
        return execute(self._box, ["say"], stdin=line).stdout

    def close(self) -> None:
        if self._box is not None:
            self._box.tainted = True
            self._pool.restore(self._box)
            self._box = None


class Runner:
    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool

    def run(self, program: str, stdin: str) -> Verdict:
        box = self._pool.checkout()  # clean: near miss, the return in the handler passes through the finally
        started = time.perf_counter()
        try:
            result = execute(box, ["python", "-c", program], stdin)
        except subprocess.TimeoutExpired:
            box.tainted = True
            return Verdict(False, "time limit")
        finally:
            self._pool.restore(box)
        return Verdict(result.returncode == 0, result.stdout, time.perf_counter() - started)

    def compare(self, program: str, reference: str, stdin: str) -> Verdict:
        theirs = self._pool.checkout()  # leak: FarmBusy or a failed boot of the second one leaves this one checked out
        ours = self._pool.checkout(timeout=5.0)  # clean: finally
        try:
            left = execute(theirs, ["python", "-c", program], stdin)
            right = execute(ours, ["python", "-c", reference], stdin)
        finally:
            self._pool.restore(ours)
            self._pool.restore(theirs)
        return Verdict(left.stdout == right.stdout, left.stdout)

    def open_dialog(self, program: str) -> Dialog:
        box = self._pool.checkout()  # clean: near miss, restored when the program does not start, otherwise by the Dialog
        try:
            execute(box, ["start", program])
        except subprocess.TimeoutExpired:
            box.tainted = True
            self._pool.restore(box)
            raise
        return Dialog(self._pool, box)

    def each_case(self, program: str, cases: Sequence[str]) -> Iterator[Verdict]:
        """The cases one by one in the same sandbox, so that imports stay warm."""
        box = self._pool.checkout()  # leak: first_failure() abandons the generator at a yield and nothing restores it
        for stdin in cases:
            result = execute(box, ["python", "-c", program], stdin)
            yield Verdict(result.returncode == 0, result.stdout)
        self._pool.restore(box)

    def first_failure(self, program: str, cases: Sequence[str]) -> int | None:
        for i, verdict in enumerate(self.each_case(program, cases)):
            if not verdict.passed:
                return i
        return None

    def compile_all(self, sources: dict[str, str]) -> dict[str, str]:
        """Name -> message; stops at the first source that hangs the compiler."""
        errors: dict[str, str] = {}
        box = self._pool.checkout()  # leak: a hanging compiler returns what is known so far and keeps the sandbox
        for name, source in sources.items():
            try:
                result = execute(box, ["compile"], source, limit=2.0)
            except subprocess.TimeoutExpired:
                errors[name] = "compiler hangs"
                box.tainted = True
                return errors
            if result.returncode:
                errors[name] = result.stderr
        self._pool.restore(box)
        return errors

    def warm(self, count: int) -> int:
        boxes: list[Sandbox] = []
        try:
            while len(boxes) < count:
                boxes.append(self._pool.checkout(timeout=1.0))  # clean: FarmBusy ends the loop and all are restored
        except FarmBusy:
            log.info("only %d sandboxes could be warmed", len(boxes))
        finally:
            for box in boxes:
                self._pool.restore(box)
        return len(boxes)
