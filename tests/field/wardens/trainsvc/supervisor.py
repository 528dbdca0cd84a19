from __future__ import annotations

import logging
import os
from typing import Callable, Iterator

from .resources import LogSink, RankSlots
from .runner import Trial, TrialRunner

logger = logging.getLogger(__name__)


class Supervisor:
    def __init__(self, runner: TrialRunner, ranks: RankSlots, sink: LogSink) -> None:
        self.runner = runner
        self.ranks = ranks
        self.sink = sink
        self.standby: list[int] = []
        self.on_done: list[Callable[[], None]] = []

    def fill_standby(self, count: int) -> int:
        while len(self.standby) < count:
            rank = self.ranks.grab()  # clean: near miss, kept on purpose in standby, drain_standby drops each
            if rank is None:
                break
            self.standby.append(rank)
        return len(self.standby)

    def drain_standby(self) -> None:
        while self.standby:
            self.ranks.drop(self.standby.pop())

    def pick_even(self) -> int:
        skipped: list[int] = []
        found = -1
        while (rank := self.ranks.grab()) is not None:  # clean: near miss, odd ranks are dropped back, the even one belongs to the caller
            if rank % 2 == 0:
                found = rank
                break
            skipped.append(rank)
        for rank in skipped:
            self.ranks.drop(rank)
        return found

    def audit(self, name: str, message: str) -> None:
        fd = self.sink.attach(name)  # clean: near miss, the callback registered here detaches it when finish() runs
        self.on_done.append(lambda: self.sink.detach(fd))
        os.write(fd, message.encode())

    def finish(self) -> None:
        for callback in self.on_done:
            callback()
        self.on_done.clear()

    def ranks_for(self, trials: list[Trial]) -> Iterator[tuple[Trial, int]]:
        for trial in trials:
            rank = self.ranks.grab()  # leak: a consumer that stops early closes the generator at the yield, the drop after it is not run
            if rank is None:
                return
            yield trial, rank
            self.ranks.drop(rank)

    def first_match(self, trials: list[Trial], wanted: str) -> bool:
        for trial, rank in self.ranks_for(trials):
            if trial.name == wanted:
                logger.info("%s would run as rank %d", wanted, rank)
                return True
        return False

    def run_all(self, trials: list[Trial]) -> int:
        started = 0
        for trial in trials:
            if not self.runner.launch(trial):
                logger.warning("trial %s was not launched", trial.name)
                continue
            started += 1
        for name in list(self.runner.trials):
            self.runner.complete(name)
        self.finish()
        return started
