"""Audits what is odd or broken beside one file with an honest leak."""

from dataclasses import dataclass
from pathlib import Path

from tests.command_line import Done, poolaudit

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


def run(folder: Path, *arguments: str, timeout: int = 120) -> Done:
    """`poolaudit audit` with nothing remembered and no settings but these; never a traceback."""
    alone = ("--no-cache", "--no-progress", "--isolated")
    done = poolaudit("audit", *arguments, *alone, cwd=folder, timeout=timeout)
    assert "Traceback" not in done.err, done.err[-4000:]
    return done


def audit(folder: Path, *paths: str, timeout: int = 120) -> Audit:
    done = run(folder, *(paths or (".",)), "--format", "json", "--select", "PA1", timeout=timeout)
    assert done.out, f"status {done.status}, nothing on standard output: {done.err[-4000:]}"
    said = done.json
    return Audit(
        done.status,
        {(f["path"], f["line"], f["code"]) for f in said["findings"]},
        {f["path"] for f in said["failures"]},
        done.err,
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
