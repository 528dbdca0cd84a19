"""The way from the acquire to the leak as stations, grouped into stretches that can be drawn downwards."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from auditor.model import Finding, Step

MOST_STATIONS = 24  # a longer path is drawn with its middle left out; json has every step
_WORD = re.compile(r"[\w.]+|\S")

Excerpts = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Station:
    """One place on the path. `columns` are characters from 0; `number` is None for the finding's own span."""

    path: str
    line: int
    columns: tuple[int, int]
    note: str
    number: int | None
    primary: bool


@dataclass(frozen=True, slots=True)
class Stretch:
    """Stations of one file at lines that do not go back; `skipped` stations were left out before it."""

    stations: tuple[Station, ...]
    skipped: int = 0

    @property
    def path(self) -> str:
        return self.stations[0].path


def stretches(finding: Finding, excerpts: Excerpts) -> Iterator[Stretch]:
    """The finding's path; a loop's way back or another file begins a new stretch."""
    stations = _stations(finding, excerpts)
    skipped = len(stations) - MOST_STATIONS
    if skipped <= 1:
        yield from _split(stations, 0)
        return
    half = MOST_STATIONS // 2
    yield from _split(stations[:half], 0)
    yield from _split(stations[half + skipped :], skipped)


def _split(stations: list[Station], skipped: int) -> Iterator[Stretch]:
    run: list[Station] = []
    for station in stations:
        if run and (station.path != run[-1].path or station.line < run[-1].line):
            yield Stretch(tuple(run), skipped)
            run, skipped = [], 0
        run.append(station)
    yield Stretch(tuple(run), skipped)


def _stations(finding: Finding, excerpts: Excerpts) -> list[Station]:
    span = finding.span
    whole = (span.column - 1, span.end_column - 1 if span.end_line == span.line else 10**9)
    stations: list[Station] = []
    for number, step in enumerate(_merged(finding.trace), 1):
        own = (step.path, step.line, step.column) == (span.path, span.line, span.column)
        columns = whole if own else _word(step.column - 1, excerpts.get(step.path, {}).get(step.line, ""))
        stations.append(Station(step.path, step.line, columns, step.note, number, own))
    if not any(station.primary for station in stations):
        stations.insert(0, Station(span.path, span.line, whole, "", None, True))
    return [_trimmed(station, excerpts) for station in stations]


def _merged(trace: Iterable[Step]) -> Iterator[Step]:
    """Steps that follow each other at one place are one station: `may raise; leaves by this exception`."""
    for _, group in groupby(trace, key=lambda step: (step.path, step.line, step.column)):
        steps = list(group)
        yield replace(steps[0], note="; ".join(step.note for step in steps))


def _word(start: int, line: str) -> tuple[int, int]:
    """A step names where it begins only; the word there is what the eye looks for."""
    match = _WORD.match(line, start)
    return (start, match.end() if match else start + 1)


def _trimmed(station: Station, excerpts: Excerpts) -> Station:
    """Carets end with the line's text, not in the blanks after it."""
    line = excerpts.get(station.path, {}).get(station.line, "").rstrip()
    start, end = station.columns
    columns = (start, max(min(end, len(line)), start + 1))
    return Station(station.path, station.line, columns, station.note, station.number, station.primary)
