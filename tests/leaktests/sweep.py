"""What a sweep has measured so far, kept line by line so that it can be run in parts.

`python -m tests.leaktests.measure_... --minutes 10` ends after so much processor time; run again it goes on
where it ended, as long as the code that it judges is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_facts

PROJECT = Path(__file__).parent.parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
SUPPORT = PROJECT / "auditor" / "leaktests" / "support"


def parser(doc: str | None, kept: str) -> ArgumentParser:
    """The options that every sweep has."""
    made = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=15.0, help="of processor time, then it ends")
    made.add_argument("--keep", type=Path, default=RESULTS / kept, help="where lines are kept (%(default)s)")
    return made


class Kept:
    """The lines of a sweep, by key; begun anew where what is judged has changed."""

    def __init__(self, file: Path, judged: Iterable[Path], minutes: float) -> None:
        self._file, self._until = file, processor_seconds() + 60 * minutes
        self.elsewhere = 0.0
        """Processor seconds of processes that are not this one's children."""
        self.rows: dict[str, dict[str, Any]] = {}
        digest = _digest(judged)
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if lines and lines[0].get("judged") == digest:
            self.rows = {row["key"]: row for row in lines[1:]}
            return
        if lines:
            print(f"{file.name} is about other code: begun anew")
        file.write_text(json.dumps({"judged": digest, "machine": machine_facts()}) + "\n")

    @property
    def time_is_up(self) -> bool:
        """Whether this part has had its processor time."""
        return processor_seconds() + self.elsewhere > self._until

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Keep one line, at once."""
        self.rows[key] = {"key": key, **row}
        with self._file.open("a") as file:
            file.write(json.dumps(self.rows[key]) + "\n")


def processor_seconds() -> float:
    """Of this process and all that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(os.fspath(file.name).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
