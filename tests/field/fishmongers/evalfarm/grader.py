"""Grades many samples of many problems."""
from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .runner import Dialog, Runner, execute
from .sandboxes import FarmBusy, SandboxPool

log = logging.getLogger(__name__)


class Grader:
    def __init__(self, pool: SandboxPool, threads: int = 8) -> None:
        self._pool = pool
        self._runner = Runner(pool)
        self._executor = ThreadPoolExecutor(threads)
        self._rounds: dict[str, Dialog] = {}
        self.passes: defaultdict[str, int] = defaultdict(int)

    def start_round(self, problem: str, program: str) -> None:
        dialog = self._runner.open_dialog(program)  # leak: a second round of the same problem overwrites the open dialogue
        log.debug("round of %s", problem)
        self._rounds[problem] = dialog

    def turn(self, problem: str, line: str) -> str:
        return self._rounds[problem].say(line)

    def end_round(self, problem: str, won: bool) -> None:
        dialog = self._rounds.pop(problem)
        self.passes[problem] += won
        dialog.close()

    def play(self, program: str, judge: Callable[[str], str | None], turns: int) -> bool:
        dialog = self._runner.open_dialog(program)  # clean: near miss, every return is inside the try with close()
        try:
            line: str | None = "ready"
            for _ in range(turns):
                line = judge(dialog.say(line))
                if line is None:
                    return True
            return False
        finally:
            dialog.close()

    def grade(self, problem: str, samples: list[str], stdin: str, expected: str) -> float:
        futures = [self._executor.submit(self._runner.run, s, stdin) for s in samples]
        for future in futures:
            try:
                verdict = future.result()
            except FarmBusy:
                continue
            self.passes[problem] += verdict.passed and verdict.output == expected
        return self.passes[problem] / max(1, len(samples))

    def versions(self) -> str:
        with self._pool.borrowed() as box:  # clean: context manager
            return execute(box, ["pip", "freeze"]).stdout

    def shutdown(self) -> None:
        self._executor.shutdown(wait=True)
        for dialog in self._rounds.values():
            dialog.close()
        self._pool.shutdown()
