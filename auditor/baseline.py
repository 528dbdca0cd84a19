"""Known findings, kept in a file and matched by fingerprint, so that only new ones are reported."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from auditor.atomic import write_atomically
from auditor.fingerprint import what
from auditor.model import Finding

VERSION = 1
Key = TypeVar("Key", str, tuple[str, str])


class BaselineError(Exception):
    """A baseline that cannot be read or written; the message names it."""


class Known(msgspec.Struct, frozen=True):
    """One known finding; everything but the fingerprint is there for the people who read the diff."""

    fingerprint: str
    code: str
    path: str
    symbol: str
    message: str


class Baseline(msgspec.Struct, frozen=True):
    version: int
    findings: tuple[Known, ...]


def read_baseline(file: Path) -> tuple[Known, ...]:
    """The known findings."""
    try:
        baseline = msgspec.json.decode(file.read_bytes(), type=Baseline)
    except OSError as error:
        raise BaselineError(f"{file}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BaselineError(f"{file}: not a baseline: {error}; make one with --write-baseline") from error
    if baseline.version != VERSION:
        raise BaselineError(f"{file}: is of version {baseline.version}; this poolaudit reads {VERSION}")
    return baseline.findings


def write_baseline(file: Path, findings: Iterable[Finding]) -> None:
    known = tuple(Known(f.fingerprint, f.code, f.span.path, f.symbol, f.message) for f in findings)
    data = msgspec.json.format(msgspec.json.encode(Baseline(VERSION, known)), indent=1)
    try:
        write_atomically(file, data + b"\n")
    except OSError as error:
        raise BaselineError(f"{file}: cannot be written: {error.strerror}") from error


def unknown(findings: Sequence[Finding], baseline: Iterable[Known]) -> list[Finding]:
    """The findings that the baseline does not hold: of three alike where it knows two, one is left.

    First by fingerprint, wherever the code went. What is then left on both sides is matched within one file
    by rule and acquire alone: a function or a class was renamed. At last the entries of files that are gone,
    again by rule and acquire, with findings in files that no entry names: both were renamed. So an entry
    excuses one finding, never two.
    """
    known = tuple(baseline)
    left = Counter(entry.fingerprint for entry in known)
    new = [finding for finding in findings if not _taken(left, finding.fingerprint)]
    unmatched = [entry for entry in known if _taken(left, entry.fingerprint)]
    renamed = Counter((entry.path, what(entry.fingerprint)) for entry in unmatched)
    new = [finding for finding in new if not _taken(renamed, (finding.span.path, what(finding.fingerprint)))]
    gone = {entry.path for entry in unmatched if not Path(entry.path).exists()}
    moved = Counter(what(entry.fingerprint) for entry in unmatched if entry.path in gone)
    named = {entry.path for entry in known}
    return [f for f in new if f.span.path in named or not _taken(moved, what(f.fingerprint))]


def _taken(left: Counter[Key], key: Key) -> bool:
    """Take one of `key` out of `left`, if there is one."""
    if left[key] <= 0:
        return False
    left[key] -= 1
    return True
