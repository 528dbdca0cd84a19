"""The path drawn on the source: line numbers, the rail from step to step, carets and notes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reports._paint import FRAME, QUIET, STRONG, Row
from reports._path import Station, Stretch
from reports._source import view
from reports._text import cells, safe, wrap

MOST_FILLED = 2  # unmarked lines between two steps that are shown rather than left out
LEAST_NOTE = 28  # cells a note needs beside its carets; with fewer it moves below them


@dataclass(frozen=True, slots=True)
class Margin:
    """What stands left of the source: line number, bar, and the rail with the steps' numbers."""

    digits: int
    rail: int
    last: int
    width: int
    style: str

    @property
    def room(self) -> int:
        """Cells that are left for source."""
        return self.width - self.digits - self.rail - 6

    def bare(self) -> Row:
        return [(" " * (self.digits + 1) + " |", FRAME)]

    def row(self, label: str, mark: str) -> Row:
        return [(f" {label:>{self.digits}} | ", FRAME), (f"{mark:<{self.rail}}  ", self.style)]

    def rail_after(self, number: int | None) -> str:
        """The rail below a step, until the last."""
        return "|" if number is not None and number < self.last else ""


def turn(before: Stretch | None, stretch: Stretch, margin: Margin, home: str) -> Iterator[Row]:
    """What is said where the drawing cannot simply go on downwards."""
    if stretch.skipped:
        yield [*margin.row("...", "|"), (f"({stretch.skipped} steps not drawn)", QUIET)]
    first = stretch.stations[0]
    if stretch.path != (before.path if before else home):
        locus = f"{stretch.path}:{first.line}:{first.columns[0] + 1}"
        if before:
            yield margin.row("", "|")
        for line in wrap(f"--> {locus}", margin.width, first=margin.digits, hanging=margin.digits + 4):
            yield [(line, STRONG)]
    elif before and not stretch.skipped:
        yield [*margin.row("", "|"), (f"(back to line {first.line})", QUIET)]


def stretch_rows(stretch: Stretch, lines: Mapping[int, str], margin: Margin) -> Iterator[Row]:
    previous: Station | None = None
    shown: str | None = None
    for station in stretch.stations:
        if previous is not None and station.line > previous.line:
            yield from _between(previous, station, lines, margin)
            shown = None
        source, row = _source(station, lines, margin)
        if source != shown:
            yield row
            shown = source
        yield from _carets(station, lines, margin)
        previous = station


def _between(previous: Station, station: Station, lines: Mapping[int, str], margin: Margin) -> Iterator[Row]:
    """Lines without a step: shown if they are few and known, else one row says that they were left out."""
    rail = margin.rail_after(previous.number)
    gap = range(previous.line + 1, station.line)
    if len(gap) <= MOST_FILLED and all(line in lines for line in gap):
        for line in gap:
            yield [*margin.row(str(line), rail), (view(lines[line].rstrip(), 0, 1, margin.room).text, "")]
    elif gap:
        yield margin.row("...", rail)


def _source(station: Station, lines: Mapping[int, str], margin: Margin) -> tuple[str, Row]:
    rail = "|" if station.number is not None and station.number > 1 else ""
    if station.line not in lines:
        return "", [*margin.row(str(station.line), rail), ("(source not at hand)", QUIET)]
    text = view(lines[station.line].rstrip(), *station.columns, margin.room).text
    return text, [*margin.row(str(station.line), rail), (text, "")]


def _carets(station: Station, lines: Mapping[int, str], margin: Margin) -> Iterator[Row]:
    """Carets under the marked characters; the note beside them, or below where it would be squeezed."""
    style = margin.style if station.primary else FRAME
    mark, rail = str(station.number or ""), margin.rail_after(station.number)
    if station.line not in lines:
        notes, carets, indent = wrap(station.note, margin.room), "", 0
    else:
        shown = view(lines[station.line].rstrip(), *station.columns, margin.room)
        carets = " " * shown.start + "^" * shown.length + " "
        notes, indent = _beside(station.note, len(carets), margin.room)
        if not notes:
            yield [*margin.row("", mark), (carets, style)]
            notes, indent = _below(station.note, shown.start, margin.room)
            mark, carets = rail, ""
    for note in notes:
        yield [*margin.row("", mark), (carets or " " * indent, style), (note, style)]
        mark, carets = rail, ""


def _beside(note: str, indent: int, room: int) -> tuple[list[str], int]:
    """The note right of its carets: if it fits on their line, or can be wrapped there readably."""
    left = room - indent
    if cells(safe(note)) > left and left < LEAST_NOTE:
        return [], 0
    return wrap(note, left), indent


def _below(note: str, start: int, room: int) -> tuple[list[str], int]:
    """The note under its carets, moved left as far as it needs."""
    indent = max(0, min(start, room - cells(safe(note))))
    return wrap(note, room - indent), indent
