"""Known findings, kept in a file and matched by fingerprint, so that only new ones are reported."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from auditor.atomic import write_atomically
from auditor.model import Finding

VERSION = 1


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


def read_baseline(file: Path) -> Counter[str]:
    """How often each fingerprint is known."""
    try:
        baseline = msgspec.json.decode(file.read_bytes(), type=Baseline)
    except OSError as error:
        raise BaselineError(f"{file}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BaselineError(f"{file}: not a baseline: {error}; make one with --write-baseline") from error
    if baseline.version != VERSION:
        raise BaselineError(f"{file}: is of version {baseline.version}; this poolaudit reads {VERSION}")
    return Counter(known.fingerprint for known in baseline.findings)


def write_baseline(file: Path, findings: Iterable[Finding]) -> None:
    known = tuple(Known(f.fingerprint, f.code, f.span.path, f.symbol, f.message) for f in findings)
    data = msgspec.json.format(msgspec.json.encode(Baseline(VERSION, known)), indent=1)
    try:
        write_atomically(file, data + b"\n")
    except OSError as error:
        raise BaselineError(f"{file}: cannot be written: {error.strerror}") from error


def unknown(findings: Iterable[Finding], baseline: Mapping[str, int]) -> list[Finding]:
    """The findings that the baseline does not hold: of three alike where it knows two, one is left."""
    left = Counter(baseline)
    new = []
    for finding in findings:
        if left[finding.fingerprint] > 0:
            left[finding.fingerprint] -= 1
        else:
            new.append(finding)
    return new
