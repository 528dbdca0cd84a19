"""Earlier runs in a file, one line of JSON each, so that a report can show where things are going."""

import datetime
from collections import Counter
from pathlib import Path

import msgspec

from auditor.model import Point, Run, Severity


class HistoryError(Exception):
    """A history that cannot be read or written; the message names it."""


def appended(file: Path, run: Run, now: datetime.datetime) -> tuple[Point, ...]:
    """All runs in `file`, oldest first, after `run` was added to it as the last."""
    earlier, text = _read(file)
    point = _point(run, now)
    separator = b"" if text.endswith(b"\n") or not text else b"\n"  # editors may have dropped the last one
    try:
        with file.open("ab") as opened:  # one write: two runs at once make two lines
            opened.write(separator + msgspec.json.encode(point) + b"\n")
    except OSError as error:
        raise HistoryError(f"{file}: cannot be written: {error.strerror}") from error
    return (*earlier, point)


def _read(file: Path) -> tuple[list[Point], bytes]:
    """The runs, and the file's text. A line that is no run is an error: nobody would see the hole."""
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return [], b""
    except OSError as error:
        raise HistoryError(f"{file}: cannot be read: {error.strerror}") from error
    points = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            points.append(msgspec.json.decode(line, type=Point))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise HistoryError(
                f"{file}:{number}: not a run: {error}; delete that line, or the file"
            ) from error
    return points, text


def _point(run: Run, now: datetime.datetime) -> Point:
    severities = Counter(finding.severity for finding in run.findings)
    support = Counter(row.support for row in run.classes)
    return Point(
        time=now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        files=run.summary.files,
        lines=run.summary.lines,
        errors=severities[Severity.ERROR],
        warnings=severities[Severity.WARNING],
        infos=severities[Severity.INFO],
        failures=len(run.failures),
        full=support["full"],
        partial=support["partial"],
        none=support["none"],
    )
