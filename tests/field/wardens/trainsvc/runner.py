from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from .resources import LeaseFile, LogSink, RankSlots, ScratchRoot

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Trial:
    name: str
    command: list[str]
    workdir: Optional[Path] = None
    log_fd: int = -1
    rank: Optional[int] = None


class TrialRunner:
    def __init__(self, scratch: ScratchRoot, sink: LogSink, ranks: RankSlots) -> None:
        self.scratch = scratch
        self.sink = sink
        self.ranks = ranks
        self.trials: dict[str, Trial] = {}

    def launch(self, trial: Trial) -> bool:
        if trial.name in self.trials:
            return False
        rank = self.ranks.grab()  # leak: a trial without command is refused with its rank taken
        if rank is None:
            return False
        if not trial.command:
            logger.error("trial %s has no command", trial.name)
            return False
        trial.rank = rank
        trial.workdir = self.scratch.create(trial.name)  # clean: near miss, kept by the trial, kill and complete discard it
        trial.log_fd = self.sink.attach(trial.name)  # leak: kill() forgets the trial's log
        self.trials[trial.name] = trial
        return True

    def complete(self, name: str) -> None:
        trial = self.trials.pop(name)
        self.sink.detach(trial.log_fd)
        self._drop_common(trial)

    def kill(self, name: str) -> bool:
        trial = self.trials.pop(name, None)
        if trial is None:
            return False
        self._drop_common(trial)
        return True

    def _drop_common(self, trial: Trial) -> None:
        if trial.rank is not None:
            self.ranks.drop(trial.rank)
            trial.rank = None
        if trial.workdir is not None:
            self.scratch.discard(trial.workdir)
            trial.workdir = None

    def log_grew(self, name: str, since: int) -> bool:
        fd = self.sink.attach(name)  # clean: near miss, detached ahead of either answer
        size = os.fstat(fd).st_size
        self.sink.detach(fd)
        if size <= since:
            return False
        logger.info("log of %s grew to %d bytes", name, size)
        return True

    def render(self, trial: Trial, template: str) -> Optional[str]:
        workdir = self.scratch.create("render-")  # leak: a template that cannot be filled returns None without discard
        try:
            text = template.format(name=trial.name, workdir=workdir)
        except KeyError:
            return None
        (workdir / "config.yaml").write_text(text)
        self.scratch.discard(workdir)
        return text

    def dry_run(self, trial: Trial) -> bool:
        workdir = self.scratch.create("dry-")  # clean: near miss, discarded in finally on each return
        try:
            if not trial.command:
                return False
            (workdir / "cmd").write_text(" ".join(trial.command))
            return True
        finally:
            self.scratch.discard(workdir)

    def export(self, lease: LeaseFile, dest: Path) -> bool:
        if not lease.acquire():  # leak: an existing destination returns before the release
            return False
        if dest.exists():
            return False
        dest.write_text("\n".join(sorted(self.trials)))
        lease.release()
        return True

    def export_if_free(self, lease: LeaseFile, dest: Path) -> bool:
        with lease as got:  # clean: near miss, __exit__ releases only what was acquired, on all returns
            if not got or dest.exists():
                return False
            dest.write_text("\n".join(sorted(self.trials)))
            return True
