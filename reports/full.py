"""Findings as the best compilers show them: the message, then the path drawn on the source.

The left margin carries line numbers; beside it a rail runs from step 1, the acquire, down to the way out:

    ring.py:42:13: PA102 early-exit-leak [error] `buffer` is still held at an early return
        |
     42 |       buffer = self.pool.allocate(x.shape)
        | 1              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^ acquired
     43 | |     if x.numel() == 0:
        | 2        ^ taken when true
     44 | |         return x
        | 3         ^^^^^^ left here with `buffer` held
        |
        = help: poolaudit rule PA102
"""

from collections.abc import Iterator

from auditor.model import Finding, Run
from reports._drawing import Margin, stretch_rows, turn
from reports._paint import FRAME, SEVERITY_STYLE, STRONG, Row, paint
from reports._path import Excerpts, Stretch, stretches
from reports._text import safe, wrap

NARROWEST = 40  # below this nothing can be drawn; such a terminal wraps by itself


def render(run: Run, *, color: bool, width: int) -> str:
    """All findings, a blank line between them."""
    width = max(width, NARROWEST)
    rows: list[Row] = []
    for finding in run.findings:
        rows += [[], *_finding(finding, run.excerpts, width)]
    return paint(rows[1:], color=color)


def _finding(finding: Finding, excerpts: Excerpts, width: int) -> Iterator[Row]:
    yield from _header(finding, width)
    drawn = list(stretches(finding, excerpts))
    margin = _margin(finding, drawn, width)
    yield margin.bare()
    before: Stretch | None = None
    for stretch in drawn:
        yield from turn(before, stretch, margin, finding.span.path)
        yield from stretch_rows(stretch, excerpts.get(stretch.path, {}), margin)
        before = stretch
    yield margin.bare()
    yield from _notes(finding, margin)


def _header(finding: Finding, width: int) -> Iterator[Row]:
    """The first line as every compiler writes it; only that line is coloured, the rest is the message."""
    span, style = finding.span, SEVERITY_STYLE[finding.severity]
    place = f"{safe(span.path)}:{span.line}:{span.column}:"
    title = [(place, STRONG), (f"{finding.code} {finding.name}", style), (f"[{finding.severity}]", style)]
    text = " ".join([*(text for text, _ in title), finding.message])
    first, *rest = wrap(text, width, hanging=4)
    row: Row = []
    for piece, piece_style in title:
        if not first.startswith(piece):
            break
        row += [(piece, piece_style), (" ", "")]
        first = first[len(piece) + 1 :]
    yield [*row, (first, "")]
    yield from ([(line, "")] for line in rest)


def _margin(finding: Finding, drawn: list[Stretch], width: int) -> Margin:
    stations = [station for stretch in drawn for station in stretch.stations]
    last = max(station.number or 0 for station in stations)
    return Margin(
        digits=max(3, *(len(str(station.line)) for station in stations)),
        rail=len(str(last or "")),
        last=last,
        width=width,
        style=SEVERITY_STYLE[finding.severity],
    )


def _notes(finding: Finding, margin: Margin) -> Iterator[Row]:
    """Where it is, what could be done, and where to read more."""
    if finding.symbol:
        yield from _note("in", finding.symbol, margin)
    if finding.fix:
        yield from _note(f"fix ({finding.fix.safety})", finding.fix.description, margin)
    if finding.proof:
        yield from _note("leak test", finding.proof.replace("_", " "), margin)
    yield from _note("help", f"poolaudit rule {finding.code}", margin)


def _note(title: str, text: str, margin: Margin) -> Iterator[Row]:
    indent = " " * (margin.digits + 2)
    first, *rest = wrap(f"{title}: {text}", margin.width - len(indent) - 2, hanging=2)
    yield [(f"{indent}= ", FRAME), (first, "")]
    yield from ([(f"{indent}  {line}", "")] for line in rest)
