"""What the page's script works on: findings, their source lines, and classes, as plain data."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from auditor.model import ClassRow, Finding, FixOffer, Run, Step
from reports._commands import adoptions, target
from reports._estimate import powers
from reports._fix_diff import Hunk, hunks
from reports._text import safe_char

LONGEST = 300  # characters of a source line or message that are carried; a minified line would fill the page
BEFORE = 60  # of which so many stand before the first place of interest, if the line is cut there

Object = dict[str, Any]


class _Texts(dict[str, int]):
    """Paths and notes, each carried once and named by its number: many findings share most of them."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def data(run: Run, packages: Mapping[str, str]) -> str:
    """JSON that may stand inside a script element: no `<`, so nothing in it ends that element."""
    texts, commands = _Texts(), adoptions(run)
    document = {
        "findings": [_finding(finding, run, packages, texts) for finding in run.findings],
        "texts": list(texts),
        "sources": _sources(run),
        "classes": [_class(row, packages, commands.get(row)) for row in run.classes],
        "target": target(run),
    }
    text = json.dumps(document, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def visible(text: str) -> str:
    """Controls and bidirectional overrides as one visible character each; tabs stay."""
    if text.isprintable():
        return text
    return "".join(char if char == "\t" else safe_char(char) for char in text)


def short(text: str) -> str:
    """`text` made visible, and cut at its end if it is very long."""
    return visible(text if len(text) <= LONGEST else text[: LONGEST - 3] + "...")


def _finding(finding: Finding, run: Run, packages: Mapping[str, str], texts: _Texts) -> Object:
    span = finding.span
    steps = finding.trace or (Step(span.path, span.line, span.column, ""),)
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "path": visible(span.path),
        "package": visible(packages.get(span.path, "")),
        "line": span.line,
        "column": span.column,
        "length": span.end_column - span.column if span.line == span.end_line else 0,
        "symbol": short(finding.symbol),
        "message": short(finding.message),
        "steps": [_step(step, texts) for step in steps],
        "fix": _fix(finding.fix, run, texts) if finding.fix else None,
        "fingerprint": finding.fingerprint,
        "proof": finding.proof,
    }


def _step(step: Step, texts: _Texts) -> list[int]:
    return [texts[visible(step.path)], step.line, step.column, texts[short(step.note)]]


def _fix(fix: FixOffer, run: Run, texts: _Texts) -> Object:
    return {
        "safety": fix.safety,
        "description": short(fix.description),
        "hunks": [_hunk(hunk, texts) for hunk in hunks(fix.edits, run.excerpts)],
    }


def _hunk(hunk: Hunk, texts: _Texts) -> list[int | str]:
    """The path by its number, then the rows."""
    rows = [row if isinstance(row, int) else short(row) for row in hunk.rows]
    return [texts[visible(hunk.path)], *rows]


def _sources(run: Run) -> dict[str, dict[int, Object | str]]:
    """path -> line -> its text; where that was cut, also from which `offset`, and whether there is `more`."""
    first: dict[tuple[str, int], int] = defaultdict(lambda: 10**9)
    for finding in run.findings:
        places = [(step.path, step.line, step.column) for step in finding.trace]
        for path, line, column in [(finding.span.path, finding.span.line, finding.span.column), *places]:
            first[path, line] = min(first[path, line], column - 1)
    return {
        visible(path): {number: _cut(line, first.get((path, number), 0)) for number, line in lines.items()}
        for path, lines in run.excerpts.items()
    }


def _cut(line: str, place: int) -> Object | str:
    start = 0 if place < LONGEST // 2 else place - BEFORE
    text = visible(line[start : start + LONGEST])
    more = start + LONGEST < len(line)
    return {"text": text, "offset": start, "more": more} if start or more else text


def _class(row: ClassRow, packages: Mapping[str, str], command: str | None) -> Object:
    return {
        "name": visible(row.name),
        "path": visible(row.path),
        "package": visible(packages.get(row.path, "")),
        "line": row.line,
        "bases": [visible(base) for base in row.bases],
        "switch": row.switch,
        "switchDefault": row.switch_default,
        "acquires": row.acquires,
        "releases": row.releases,
        "cleansUp": row.cleans_up,
        "support": row.support,
        "priority": row.priority,
        "bytes": short(row.estimated_bytes) if row.estimated_bytes else None,
        "powers": asdict(powers(row.estimated_bytes)) if row.estimated_bytes else None,
        "reason": short(row.reason),
        "edits": row.edits,
        "adopt": command,
    }
