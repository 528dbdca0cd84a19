"""What a search has tried, and what it found."""

import time
from dataclasses import dataclass, field

from auditor.leaktests.plan import Argument
from auditor.leaktests.probe.running import said


class NoPlan(Exception):
    """Every combination failed; the message is what the likeliest one ended with."""


@dataclass(slots=True)
class Attempts:
    """What was tried: how often, and how the likeliest calls of each stage ended."""

    patience: float
    """Seconds of processor time: a search that goes by the clock finds less on a busy machine."""
    deadline: float
    """By the clock, for what sleeps and before it counts as hanging."""
    tried: int = 0
    started: float = field(default_factory=time.process_time)
    told: list[str] = field(default_factory=list)

    def failed(self, call: str, error: BaseException) -> None:
        """Keep the first few."""
        if len(self.told) < 6:
            self.told.append(f"{call}: {said(error)}")

    @property
    def out_of_time(self) -> bool:
        return time.process_time() > self.started + self.patience or time.monotonic() > self.deadline


@dataclass(frozen=True, slots=True)
class Way:
    """A way to build and feed that ran."""

    build: tuple[Argument, ...]
    feed: tuple[Argument, ...]
    imports: tuple[str, ...]
