"""The trace file: compressed JSON, one list of whole numbers a step.

A positive number allocates so many bytes; a negative one, -k, frees the k-th allocation back from the newest.
Relative numbers make the steps of a training run equal to each other, so they compress to almost nothing.
After the last step everything has been freed: a trace can be replayed in a circle.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Trace:
    """A recorded run."""

    name: str
    source: str
    """What was run, in words."""
    steps: list[list[int]]

    def events(self) -> Iterator[tuple[int, int, int]]:
        """(step, allocation number, bytes) for an allocation, (step, allocation number, 0) for a free."""
        made = 0
        for number, step in enumerate(self.steps):
            for event in step:
                if event > 0:
                    yield number, made, event
                    made += 1
                else:
                    yield number, made + event, 0

    def peak(self) -> int:
        """The most bytes alive at once."""
        alive: dict[int, int] = {}
        now = most = 0
        for _, number, nbytes in self.events():
            now += nbytes - (0 if nbytes else alive.pop(number))
            if nbytes:
                alive[number] = nbytes
            most = max(most, now)
        return most


def load(path: Path) -> Trace:
    """Read a trace file."""
    with gzip.open(path, "rt") as file:
        data = json.load(file)
    return Trace(data["name"], data["source"], data["steps"])


def save(trace: Trace, path: Path) -> None:
    """Write a trace file; the same trace gives the same bytes."""
    data = {"name": trace.name, "source": trace.source, "steps": trace.steps}
    text = json.dumps(data, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
