"""The same files through other tools, each with the one check that comes nearest; what is not installed is
named.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timing import python_files, run


@dataclass(frozen=True, slots=True)
class Peer:
    """`accepted` are the exit statuses of a run that did its work; some tools count their findings there."""

    name: str
    check: str
    package: str
    installed: Callable[[], bool]
    command: list[str]
    accepted: tuple[int, ...]
    whole_tree: bool


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


PEERS = (
    Peer("Ruff", "SIM115 (open without with)", "ruff", lambda: _has_module("ruff"),
         [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--exit-zero", "--preview",
          "--select", "SIM115", "--output-format", "concise"], (0,), True),
    Peer("TorchFix", "its default rules", "torchfix", lambda: _has_module("torchfix"),
         [sys.executable, "-m", "torchfix"], (0, 1), False),
    Peer("Pylint", "consider-using-with", "pylint", lambda: _has_module("pylint"),
         [sys.executable, "-m", "pylint", "--disable=all", "--enable=consider-using-with",
          "--jobs=1", "--score=n"],
         tuple(range(32)), False),
)  # fmt: skip


def peers(tree: Path, limit: int) -> list[dict[str, object]]:
    """One entry a peer. Slow ones get every n-th file: a part spread over the tree, and stated."""
    files = python_files(tree)
    step = max(1, len(files) // limit)
    part = files[::step][:limit]
    return [_measure(peer, files if peer.whole_tree else part, tree) for peer in PEERS]


def _measure(peer: Peer, files: list[Path], tree: Path) -> dict[str, object]:
    entry: dict[str, object] = {"name": peer.name, "check": peer.check}
    if not peer.installed():
        print(f"skipped {peer.name}: not installed (pip install {peer.package})", file=sys.stderr)
        return {**entry, "skipped": f"not installed: pip install {peer.package}"}
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    targets = [str(tree)] if peer.whole_tree else [str(path) for path in files]
    timing = run([*peer.command, *targets], accepted=peer.accepted)
    audit = run([sys.executable, "-m", "auditor.cli", "audit", "--isolated", "--exit-zero", "--no-progress",
                 "--no-cache", "--format", "json", *targets])  # fmt: skip
    return {
        **entry,
        "files": len(files),
        "lines": lines,
        "seconds": timing.seconds,
        "lines_per_second": round(lines / timing.seconds),
        "audit_seconds_on_the_same": audit.seconds,
        "times_slower_than_the_audit": round(timing.seconds / audit.seconds, 2),
    }
