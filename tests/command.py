"""Runs the command in a process of its own, beside one file with an honest leak."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LEAK = "def leak(pool):\n    buf = pool.acquire(8)\n    buf[0] = 1\n"
LEAK_LINE = 2
PLANTED = ("leaky.py", LEAK_LINE, "PA101")


@dataclass(frozen=True, slots=True)
class Audit:
    """What one run of the command said."""

    status: int
    findings: set[tuple[str, int, str]]
    failed: set[str]
    stderr: str


def run(folder: Path, *arguments: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    """`poolaudit audit` with nothing remembered and no settings but these; never a traceback."""
    command = [sys.executable, "-m", "auditor.cli", "audit", *arguments]
    command += ["--no-cache", "--no-progress", "--isolated"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    return done


def audit(folder: Path, *paths: str, timeout: int = 120) -> Audit:
    done = run(folder, *(paths or (".",)), "--format", "json", "--select", "PA1", timeout=timeout)
    assert done.stdout, f"status {done.returncode}, nothing on standard output: {done.stderr[-4000:]}"
    said = json.loads(done.stdout)
    return Audit(
        done.returncode,
        {(f["path"], f["line"], f["code"]) for f in said["findings"]},
        {f["path"] for f in said["failures"]},
        done.stderr,
    )


def readable(source: bytes) -> bool:
    """Whether Python itself takes these bytes for a program."""
    try:
        compile(source, "source.py", "exec")
    except (SyntaxError, ValueError, LookupError):
        return False
    return True


def tree_with_a_leak(folder: Path) -> Path:
    """To see that the others' trouble does not touch an honest finding."""
    (folder / "leaky.py").write_text(LEAK)
    return folder
