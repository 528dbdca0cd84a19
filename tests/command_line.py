"""Runs the command line as a user does: a process, its streams, its status."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent
UNUSED = "x = 1  # poolaudit: ignore[PA101]\n"  # the smallest program with a finding: PA002


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


def poolaudit(*arguments: str, cwd: Path, stdin: bytes = b"", timeout: int = 120, **environment: str) -> Done:
    env = {**os.environ, "PYTHONPATH": str(PROJECT), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "auditor.cli", *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        env=env,
        timeout=timeout,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def places(document: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(finding["path"], finding["line"], finding["code"]) for finding in document["findings"]]


def without_seconds(text: str) -> dict[str, Any]:
    document = json.loads(text)
    del document["summary"]["seconds"]
    return document
