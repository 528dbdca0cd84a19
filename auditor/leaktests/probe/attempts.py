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

    tried: int = 0
    deadline: float = 0.0
    told: list[str] = field(default_factory=list)

    def failed(self, call: str, error: BaseException) -> None:
        """Keep the first few."""
        if len(self.told) < 6:
            self.told.append(f"{call}: {said(error)}")

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


@dataclass(frozen=True, slots=True)
class Way:
    """A way to build and feed that ran."""

    build: tuple[Argument, ...]
    feed: tuple[Argument, ...]
    imports: tuple[str, ...]
